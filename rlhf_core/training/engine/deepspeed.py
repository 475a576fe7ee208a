"""The DeepSpeed engine (ZeRO).

Optimiser state, gradients and weights are sharded over ranks, or offloaded to CPU memory.

DeepSpeed averages gradients over ranks where this project sums them, so losses are multiplied by
the number of ranks. The engine decides when a step ends (``managed_gradient_accumulation: false``),
so a step may have any number of passes.
"""

from __future__ import annotations

import copy
import gc
import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_core.config.model import OptimizerConfig
from rlhf_core.config.operations import LaunchConfig
from rlhf_core.errors import ConfigError, ModelError, RlhfError
from rlhf_core.models.adapters import NF4Linear
from rlhf_core.models.architecture import has_plain_head, is_sharded, probe_ids
from rlhf_core.models.forward import run_as_wrapped
from rlhf_core.models.precision import Precision, matmul_precision
from rlhf_core.runtime import distributed
from rlhf_core.training.checkpoints.checkpoint import Piece, SavedTensors
from rlhf_core.training.engine.base import (
    Engine,
    OptimizerBuilder,
    Result,
    StepResult,
    build_adamw,
    clip_scale,
    trained_parameters,
)
from rlhf_core.training.engine.shards import Shards
from rlhf_core.training.engine.zero_config import frozen_config, zero_config

STALE_SECONDS = 1800.0  # no single build takes that long
TRAINED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# By how much outputs of the same weights may differ, as a share of their norm, on one device and on
# two.
SAME_DEVICE = 1e-4
OTHER_DEVICE: dict[Precision, float] = {
    "float64": 1e-4,
    "float32": 1e-4,
    "tf32": 0.01,
    "bfloat16": 0.05,
}

logger = logging.getLogger(__name__)


def remove_stale_build_locks() -> None:
    """Remove locks of torch's extension folder that are older than half an hour, and warn.

    DeepSpeed compiles its operators at first use, and torch guards the build by a file that whoever
    comes next waits for without an end. A process killed in between leaves it, and every later run
    would hang in silence.
    """
    from torch.utils.cpp_extension import get_default_build_root

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    for lock in sorted(root.glob("**/lock")):
        try:
            age = time.time() - lock.stat().st_mtime
            if age > STALE_SECONDS:
                lock.unlink()
                logger.warning(
                    "removed %s, which a build that was killed %.0f minutes ago left behind",
                    lock,
                    age / 60,
                )
        except OSError:  # another rank was faster, or the folder belongs to someone else
            continue


class Skeleton:
    """A copy of a model with empty parameters. Tied parameters stay tied; buffers are copied."""

    def __init__(self, model: nn.Module) -> None:
        empty = {
            id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
            for p in model.parameters()
        }
        self.model = copy.deepcopy(model, dict(empty))

    def filled(self, weights: Mapping[str, Tensor], device: torch.device) -> nn.Module:
        """Return a model with ``weights`` (by parameter name) on ``device``.

        Parameters without a weight stay empty.

        Raises:
            ModelError: A weight has another shape, as a shard has.
        """
        full, model = {}, copy.deepcopy(self.model)
        for name, parameter in model.named_parameters():
            if name not in weights:
                continue
            if weights[name].shape != parameter.shape:
                gathered, expected = tuple(weights[name].shape), tuple(parameter.shape)
                raise ModelError(
                    f"the weight {name} was gathered with shape {gathered} instead of {expected}"
                )
            full[id(parameter)] = nn.Parameter(
                weights[name].to(device), requires_grad=parameter.requires_grad
            )
        for module in model.modules():
            for name, empty in module._parameters.items():
                if empty is not None and id(empty) in full:
                    module._parameters[name] = full[id(empty)]
        move_buffers(model, device)
        return model.eval()


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move all buffers, but no parameter, to ``device``."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = buffer if buffer is None else buffer.to(device)


MISSING = (
    "engine deepspeed is chosen, but DeepSpeed is not installed; install it with pip install 'rlhf-pipeline[gpu]', or "
    "set compute.launch.STAGE.engine to local"
)


def load_deepspeed() -> Any:
    """Import DeepSpeed and join it to this process's group.

    ``RlhfError`` with one line where it is not installed.
    """
    os.environ.setdefault("DS_ACCELERATOR", distributed.device().type)
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed reads it even without a launcher
    try:
        import deepspeed
    except ImportError as error:
        raise RlhfError(MISSING) from error
    deepspeed.logger.setLevel("WARNING")
    # DeepSpeed uses names of collectives that torch deprecates; a user cannot act on that.
    warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)
    distributed.require_group()
    remove_stale_build_locks()
    # On CPUs DeepSpeed would first compile an all-reduce that only its tensor parallelism calls.
    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
    deepspeed.init_distributed(dist_backend=None, auto_mpi_discovery=False, verbose=False)
    return deepspeed


@torch.no_grad()
def probe(model: nn.Module | ShardedModel, states: bool = False) -> Tensor:
    """Outputs of a language model or a scalar model on fixed tokens, on the CPU in float32.

    With ``states`` those of a scalar model are its hidden states, for a scalar near zero has
    rounding of any share.
    """
    embedding = next(module for module in model.modules() if isinstance(module, nn.Embedding))
    ids = probe_ids(embedding.num_embeddings).to(embedding.weight.device)
    training, mask = model.training, torch.ones_like(ids)
    model.eval()
    if states and hasattr(model, "hidden"):
        output = run_as_wrapped(cast("Any", model), lambda: cast("Any", model).hidden(ids, mask))
    else:
        output = model(input_ids=ids, attention_mask=mask)
    model.train(training)
    return (output if isinstance(output, Tensor) else output.logits).float().cpu()


class Root(nn.Module):
    """The module that DeepSpeed wraps.

    Every pass goes through its ``forward``, whatever part of the model it runs.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], Result]) -> Result:
        """Return the result of ``compute``, which runs the model."""
        return compute()


def initialize(package: Any, model: nn.Module, settings: dict[str, Any], **optimizer: Any) -> Any:
    """DeepSpeed's engine of ``model``.

    Under ZeRO 3 weights go to the device one after another, each sharded at once.

    So the model may be in host memory, and no device ever holds all of it.
    """
    root, device = Root(model), distributed.device()
    if settings["zero_optimization"]["stage"] == 3:
        dtype = next(model.parameters()).dtype
        for parameter in model.parameters():
            # Adapters are float32 before; DeepSpeed keeps one precision.
            if parameter.dtype in TRAINED_DTYPES:
                parameter.data = parameter.data.to(dtype)
        move_buffers(model, device)
        package.zero.Init(module=root, config_dict_or_path=copy.deepcopy(settings), dtype=dtype)
    engine, *_ = package.initialize(model=root, config=settings, **optimizer)
    return engine


def drop(engine: Any) -> None:
    """Free weights, gradients and optimiser state of one of DeepSpeed's engines.

    Its ``destroy`` alone frees none: hooks, parameters and whoever holds the model keep its buffers
    alive.
    """
    engine.destroy()
    for module in engine.modules():
        for name, hooks in vars(module).items():
            if name.endswith("_hooks"):
                hooks.clear()
    for parameter in engine.parameters():
        parameter.data, parameter.grad = parameter.new_empty(0), None
        vars(parameter).clear()  # DeepSpeed's shards and mappings
    vars(engine.optimizer).clear()


class ShardedModel:
    """A model whose weights are sharded over the ranks and gathered layer by layer.

    It serves passes outside of training steps.

    All ranks make the same number of passes. Other attributes are those of the model itself.
    """

    def __init__(self, model: nn.Module, engine: Any, skeleton: Skeleton) -> None:
        self.model, self.ds, self.skeleton = model, engine, skeleton

    @classmethod
    def frozen(cls, model: nn.Module, launch: LaunchConfig) -> ShardedModel:
        """Shard a model that is only read."""
        if isinstance(model, PreTrainedModel):
            has_plain_head(model)  # compared while its weights are whole
        skeleton, package = Skeleton(model), load_deepspeed()
        config = frozen_config(launch, next(model.parameters()).dtype)
        return cls(model, initialize(package, model, config), skeleton)

    def __call__(self, **inputs: Any) -> Any:
        """The model's own forward."""
        return self.run(lambda: self.model(**inputs))

    def run(self, compute: Callable[[], Result]) -> Result:
        """Run ``compute``, which uses parts of the model; layers gather their weights meanwhile."""
        result: Result = self.ds(compute)
        return result

    def gathered(self, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Parameters and buffers of the model, each whole until the next is asked for.

        All ranks must take all.
        """
        return gathered(self.ds, weights)

    def on_host(self) -> nn.Module | None:
        """A plain copy of the model in the host memory of rank 0, gathered weight by weight.

        None on other ranks.
        """
        weights = gathered_on_host(self.ds, dict(self.model.named_parameters()))
        return (
            self.skeleton.filled(weights, torch.device("cpu"))
            if distributed.is_rank_zero()
            else None
        )

    def let_go(self) -> None:
        """Free what its passes have left gathered; see :func:`let_go`."""
        let_go(self.ds)

    def drop(self) -> None:
        """Free the weights; the model cannot be used any more."""
        drop(self.ds)
        del self.ds, self.model
        gc.collect()

    def get_output_embeddings(self) -> Callable[[Tensor], Tensor] | None:
        """The unembedding as a function whose weight is gathered in every call."""
        head = self.model.get_output_embeddings()  # type: ignore[operator]
        return None if head is None else lambda states: self.run(lambda: head(states))

    def reply_scores(
        self, input_ids: Tensor, attention_mask: Tensor, reply_mask: Tensor | None = None
    ) -> Tensor:
        """The scalar of a scalar model for each row's reply: (B, L) each -> (B,)."""
        model: Any = self.model
        scores: Tensor = self.run(lambda: model.reply_scores(input_ids, attention_mask, reply_mask))
        return scores

    def token_scores(self, *inputs: Tensor | None) -> Tensor:
        """The scalar at every position, as :meth:`ScalarModel.token_scores` gives it."""
        model: Any = self.model
        scores: Tensor = self.run(lambda: model.token_scores(*inputs))
        return scores

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def let_go(engine: Any) -> None:
    """Free what ZeRO 3 still holds gathered from its last passes.

    It may also have begun to gather for a pass that did not come.
    """
    if engine.zero_optimization_partition_weights():
        getattr(engine.optimizer, "parameter_offload", engine.optimizer).partition_all_parameters()


def gathered(engine: Any, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, each whole until the next is asked for.

    All ranks must ask for all of them.
    """
    from deepspeed.runtime.zero import GatheredParameters

    let_go(engine)
    for name, weight in weights.items():
        with GatheredParameters([weight]) if is_sharded(weight) else nullcontext():
            yield name, weight.detach()


def gathered_on_host(engine: Any, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Whole parameters in the host memory of rank 0, gathered one at a time by all ranks.

    Empty on the others.
    """
    weights = {}
    for name, value in gathered(engine, parameters):
        if distributed.is_rank_zero():
            weights[name] = value.clone() if value.device.type == "cpu" else value.cpu()
        del value  # before the next one is gathered
    return weights


class DeepSpeedEngine(Engine):
    """A model whose optimiser state, gradients or weights are sharded over the ranks."""

    def __init__(
        self,
        model: nn.Module,
        config: OptimizerConfig,
        total_steps: int,
        name: str,
        warmup_steps: int | None,
        launch: LaunchConfig,
        folder: Path,
        build: OptimizerBuilder = build_adamw,
    ) -> None:
        """Wrap ``model``. A relative file named by ``launch.deepspeed`` lies in ``folder``."""
        super().__init__(model, config, total_steps, name, warmup_steps)
        package = load_deepspeed()
        dtype = next(model.parameters()).dtype
        settings = zero_config(launch, dtype, config.max_grad_norm, folder)
        zero = settings["zero_optimization"]
        self.stage = int(zero["stage"])
        # DeepSpeed allocates whole buckets, however small the model is.
        trained = sum(parameter.numel() for parameter in trained_parameters(model).values())
        zero["reduce_bucket_size"] = min(int(zero["reduce_bucket_size"]), max(trained, 1))
        if isinstance(model, PreTrainedModel):
            has_plain_head(model)  # compared while its weights are whole
        self.skeleton = Skeleton(model)
        optimizer = build(model, config)
        self.ds = initialize(package, model, settings, optimizer=optimizer)
        self.shards = Shards(self.ds, self.stage, package)
        self.norm = 0.0
        self.pending = False  # whether there are gradients that no step has used
        if self.stage == 0:
            # Nothing is sharded: DeepSpeed calls the plain optimiser, which clips and skips here.
            self.ds.optimizer.register_step_pre_hook(self._clip)

    def forward(self, compute: Callable[[], Result]) -> Result:
        result: Result = super().forward(lambda: self.ds(compute))
        return result

    def backward(self, loss: Tensor) -> None:
        # Every rank makes every pass, so a non-finite loss is passed on as NaN, which DeepSpeed's
        # own check finds. The device decides, so that nothing waits for it before the step.
        finite = loss.detach().isfinite()
        scale = torch.where(finite, float(distributed.world_size()), math.nan).to(loss.dtype)
        with distributed.MARKS.waiting("a backward pass"):
            self.ds.backward(loss * scale)
        self.pending = True

    def grad_norm(self) -> float:
        raise ConfigError(
            f"{self.name}: engine deepspeed has no gradient norm common to two models; set ppo.gradient_norm to "
            "separate, or the launch engine to local"
        )

    def apply(self, grad_norm: float, scale: float) -> StepResult:
        raise ConfigError(f"{self.name}: engine deepspeed cannot scale gradients before its step")

    def step(self) -> StepResult:
        rate = self.rate()
        for group in self.ds.optimizer.param_groups:
            group["lr"] = rate
        with distributed.MARKS.waiting("an optimiser step"):
            self.ds.step()
        self.pending = False
        norm = self.norm if self.stage == 0 else float(self.ds.get_global_grad_norm())
        return self.counted(norm if math.isfinite(norm) and norm >= 0 else math.nan, rate)

    def _clip(self, optimizer: torch.optim.Optimizer, *unused: Any) -> None:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.norm = float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0
        if not math.isfinite(self.norm):
            optimizer.zero_grad(set_to_none=True)
        elif (scale := clip_scale(self.norm, self.max_grad_norm)) != 1.0:
            torch._foreach_mul_(gradients, scale)

    def gathered_parameters(self) -> AbstractContextManager[None]:
        return self.shards.gathered(self.model)  # with DeepSpeed's hooks removed

    def reader(self) -> ShardedModel | None:
        return ShardedModel(self.model, self.ds, self.skeleton) if self.stage == 3 else None

    def state(self) -> tuple[dict[str, Piece], dict[str, Any]]:
        pieces: dict[str, Piece] = {}
        for name, parameter in trained_parameters(self.model).items():
            parts = self.shards.pieces(parameter, self.optimizer_steps)
            pieces |= {key.replace("NAME", name): piece for key, piece in parts.items()}
        return pieces, self.counters()

    def load_state(self, tensors: SavedTensors, meta: dict[str, Any]) -> None:
        parameters = self.parameters_of(tensors)
        self.load_counters(meta)
        if self.pending:
            # Only a step clears the gradients that DeepSpeed has stored. All that it changes is
            # overwritten below.
            self.ds.step()
            self.pending = False
        for name, parameter in parameters.items():
            self.shards.write(parameter, name, tensors)

    def trained_weights(self) -> dict[str, Tensor]:
        return gathered_on_host(self.ds, trained_parameters(self.model))

    def release(self) -> nn.Module:
        """Return a plain copy of the model with the gathered weights on rank 0.

        The shards are freed first.

        Under ZeRO 3 it is in host memory, for a device may have no room for all of it.

        Raises:
            ModelError: It does not compute what the sharded model did.
        """
        # These stay where they are.
        packed = any(isinstance(module, NF4Linear) for module in self.model.modules())
        here = torch.device("cpu") if self.stage == 3 and not packed else distributed.device()
        moved = here != distributed.device()
        allowed = OTHER_DEVICE[matmul_precision(self.model)] if moved else SAME_DEVICE
        expected = probe(self.reader() or self.model, moved)
        weights = gathered_on_host(self.ds, dict(self.model.named_parameters()))
        self._drop()
        self.model = self.skeleton.filled(weights, here)
        if (
            distributed.is_rank_zero()
            and not (probe(self.model, moved) - expected).norm() <= allowed * expected.norm()
        ):
            raise ModelError(
                f"{self.name}: the weights gathered from {distributed.world_size()} ranks do not compute what the "
                "sharded ones did; nothing was saved, and the last checkpoint holds the training's state"
            )
        return self.model

    def _drop(self) -> None:
        drop(self.ds)
        del self.ds, self.shards
        gc.collect()
