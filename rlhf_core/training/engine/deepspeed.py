"""The DeepSpeed engine (ZeRO): optimiser state, gradients and weights sharded over ranks, or offloaded to CPU memory.

DeepSpeed averages gradients over ranks where this project sums them, so losses are multiplied by the number of ranks.
The engine decides when a step ends (``managed_gradient_accumulation: false``), so a step may have any number of passes.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_core.config.model import OptimizerConfig
from rlhf_core.config.operations import LaunchConfig
from rlhf_core.errors import ConfigError, ModelError, RlhfError
from rlhf_core.models.forward import probe_ids
from rlhf_core.runtime import distributed
from rlhf_core.training.checkpoints.pieces import Piece, SavedTensors
from rlhf_core.training.engine import shards
from rlhf_core.training.engine.base import (
    EngineState,
    OptimizerBuilder,
    Result,
    StepCount,
    StepResult,
    clip_scale,
    trained_parameters,
)
from rlhf_core.training.engine.build_locks import remove_stale_build_locks
from rlhf_core.training.engine.local import require_same_model
from rlhf_core.training.engine.skeleton import Skeleton
from rlhf_core.training.engine.zero_config import zero_config
from rlhf_core.training.optim import build_adamw

MISSING = (
    "engine deepspeed is chosen, but DeepSpeed is not installed; install it with pip install 'rlhf-pipeline[gpu]', or "
    "set compute.launch.STAGE.engine to local"
)


def load_deepspeed() -> Any:
    """Import DeepSpeed and join it to this process's group; ``RlhfError`` with one line where it is not installed."""
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
def probe(model: nn.Module) -> Tensor:
    """Outputs of a language model or a scalar model on fixed tokens, on the CPU in float32."""
    embedding = next(module for module in model.modules() if isinstance(module, nn.Embedding))
    ids = probe_ids(embedding.num_embeddings).to(distributed.device())
    training = model.training
    output = model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids))
    model.train(training)
    return (output if isinstance(output, Tensor) else output.logits).float().cpu()


class Root(nn.Module):
    """The module that DeepSpeed wraps: every pass goes through its ``forward``, whatever part of the model it runs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], Result]) -> Result:
        """Return the result of ``compute``, which runs the model."""
        return compute()


class DeepSpeedEngine(StepCount):
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
        super().__init__(config, total_steps, warmup_steps)
        package = load_deepspeed()
        self.model, self.name = model, name
        dtype = next(model.parameters()).dtype
        settings = zero_config(launch, dtype, config.max_grad_norm, folder)
        zero = settings["zero_optimization"]
        self.stage = int(zero["stage"])
        # DeepSpeed allocates whole buckets, however small the model is.
        trained = sum(parameter.numel() for parameter in trained_parameters(model).values())
        zero["reduce_bucket_size"] = min(int(zero["reduce_bucket_size"]), max(trained, 1))
        self.skeleton = Skeleton(model)
        optimizer = build(model, config)
        self.ds, *_ = package.initialize(model=Root(model), optimizer=optimizer, config=settings)
        self.shards = shards.Shards(self.ds, self.stage, package)
        self.norm = 0.0
        self.pending = False  # whether there are gradients that no step has used
        if self.stage == 0:
            # Nothing is sharded: DeepSpeed calls the plain optimiser, which clips and skips here.
            self.ds.optimizer.register_step_pre_hook(self._clip)

    def forward(self, compute: Callable[[], Result]) -> Result:
        """Run ``compute``, with sharded weights gathered where it needs them, and return its result."""
        with self.forward_context():
            result: Result = self.ds(compute)
        return result

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of ``loss`` (a scalar). If the loss is not finite, this step is skipped."""
        # Every rank makes every pass, so a non-finite loss is passed on as NaN, which DeepSpeed's own check finds. The
        # device decides, so that nothing waits for it before the step.
        finite = loss.detach().isfinite()
        scale = torch.where(finite, float(distributed.world_size()), math.nan).to(loss.dtype)
        self.ds.backward(loss * scale)
        self.pending = True

    def grad_norm(self) -> float:
        """Not supported, because DeepSpeed clips inside its step."""
        raise ConfigError(
            f"{self.name}: engine deepspeed has no gradient norm common to two models; set ppo.gradient_norm to "
            "separate, or the launch engine to local"
        )

    def apply(self, grad_norm: float, scale: float) -> StepResult:
        """Not supported, like :meth:`grad_norm`."""
        raise ConfigError(f"{self.name}: engine deepspeed cannot scale gradients before its step")

    def step(self) -> StepResult:
        """Clip by the global norm and step; a step whose gradient is not finite is skipped.

        Raises:
            TrainingPaused: Three steps in a row were skipped.
        """
        rate = self.rate()
        for group in self.ds.optimizer.param_groups:
            group["lr"] = rate
        self.ds.step()
        self.pending = False
        norm = self.norm if self.stage == 0 else float(self.ds.get_global_grad_norm())
        finite = math.isfinite(norm) and norm >= 0
        self.count(finite)
        if not finite:
            norm = math.nan
            self.pause_after_repeated_skips(f"gradient norm {norm}", rate, [])
        return StepResult(norm, not finite, rate)

    def _clip(self, optimizer: torch.optim.Optimizer, *unused: Any) -> None:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.norm = float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0
        if not math.isfinite(self.norm):
            optimizer.zero_grad(set_to_none=True)
        elif (scale := clip_scale(self.norm, self.max_grad_norm)) != 1.0:
            torch._foreach_mul_(gradients, scale)

    @contextmanager
    def gathered_parameters(self) -> Iterator[None]:
        """Gather full parameters on every rank for no-grad forwards, with DeepSpeed's hooks removed."""
        with self.shards.gathered(self.model):
            yield

    def state(self) -> EngineState:
        """This rank's shards of the float32 trained weights and of their moments, under names common to all engines."""
        pieces: dict[str, Piece] = {}
        for name, parameter in trained_parameters(self.model).items():
            parts = self.shards.pieces(parameter, self.optimizer_steps)
            pieces |= {key.replace("NAME", name): piece for key, piece in parts.items()}
        return EngineState(pieces, self.counters())

    def load_state(self, tensors: SavedTensors, meta: dict[str, Any]) -> None:
        """Restore :meth:`state` of any engine and number of ranks; gradients are cleared.

        Raises:
            CheckpointError: It is of another model.
        """
        parameters = trained_parameters(self.model)
        require_same_model(tensors.names, set(parameters), self.name)
        self.load_counters(meta)
        if self.pending:
            # Only a step clears the gradients that DeepSpeed has stored. All that it changes is overwritten below.
            self.ds.step()
            self.pending = False
        for name, parameter in parameters.items():
            self.shards.write(parameter, name, tensors)

    def trained_weights(self) -> dict[str, Tensor]:
        """Trained parameters by name in their computing precision, on the CPU of rank 0."""
        return self._gathered(trained_parameters(self.model))

    def _gathered(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Gather whole parameters one at a time; empty but on rank 0."""
        weights = {}
        for name, parameter in parameters.items():
            value = self.shards.weight(parameter)
            if distributed.is_rank_zero():
                weights[name] = value.cpu()
        return weights

    def release(self) -> nn.Module:
        """Return a plain copy of the model with the gathered weights on rank 0; the shards are freed.

        Raises:
            ModelError: It does not compute what the sharded model did.
        """
        with self.gathered_parameters():
            expected = probe(self.model)
        weights = self._gathered(dict(self.model.named_parameters()))
        self.ds.destroy()
        released = self.skeleton.filled(weights, distributed.device())
        if distributed.is_rank_zero() and not torch.allclose(probe(released), expected, atol=1e-5, rtol=1e-4):
            raise ModelError(
                f"{self.name}: the weights gathered from {distributed.world_size()} ranks do not compute what the "
                "sharded ones did; nothing was saved, and the last checkpoint holds the training's state"
            )
        return released
