"""Engines, which own a model, its optimiser and its schedule, and the one in plain torch.

Losses handed to ``backward`` are already divided by the totals of the whole optimiser step over all
ranks (algorithms.md §6), so that gradients of several calls and of several ranks add up, and
neither micro-batches nor the number of ranks change the result.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn, optim

from rlhf_core.config.model import OptimizerConfig
from rlhf_core.errors import CheckpointError, TrainingPaused
from rlhf_core.models.kernels import use_kernels
from rlhf_core.models.precision import LOW_PRECISION
from rlhf_core.runtime import distributed
from rlhf_core.training.checkpoints.checkpoint import Piece, SavedTensors, pieces_of_rank


def lr_at(
    step: int, total_steps: int, config: OptimizerConfig, warmup_steps: int | None = None
) -> float:
    """Learning rate of optimiser step ``step``, counted from 0, of ``total_steps``.

    Warm-up (``warmup_steps``, else the configured share of all steps, rounded up) rises linearly
    and reaches the peak in its last step. Then ``cosine`` falls to ``final_ratio`` of the peak
    (algorithms.md §1), ``inverse_sqrt`` is ``lr * sqrt(warmup / step)`` and ``constant`` stays.
    """
    warmup = warmup_steps if warmup_steps is not None else math.ceil(config.warmup * total_steps)
    if step < warmup:
        return config.peak * (step + 1) / warmup
    if config.schedule == "inverse_sqrt":
        return config.peak * math.sqrt(max(warmup, 1) / max(warmup, step, 1))
    if config.schedule == "constant":
        return config.peak
    progress = min((step - warmup) / max(total_steps - warmup, 1), 1.0)
    floor = config.final_ratio
    return config.peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


def build_adamw(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters.

    Norms and biases (fewer than two dimensions) do not decay.

    The fused form makes one pass per parameter on CPU and GPU, a tenth of the step's time for a
    tiny model.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trainable if p.dim() >= 2]
    others = [p for p in trainable if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    filled = [group for group in groups if group["params"]]
    return torch.optim.AdamW(filled, lr=config.peak, betas=config.betas, eps=config.eps, fused=True)


MAX_NONFINITE_IN_A_ROW = 3
OPTIMIZER_SLOTS = ("exp_avg", "exp_avg_sq", "step")
Result = TypeVar("Result")
OptimizerBuilder = Callable[[nn.Module, OptimizerConfig], optim.Optimizer]


@dataclass(frozen=True)
class StepResult:
    """The outcome of one optimiser step.

    Attributes:
        grad_norm: Global norm before clipping; not finite in a skipped step.
        skipped: Whether the step was skipped because its gradient was not finite.
        lr: Learning rate of the step.
    """

    grad_norm: float
    skipped: bool
    lr: float


COUNTERS = ("steps", "skipped_steps", "passed_over_steps", "nonfinite_in_a_row")


class Engine(ABC):
    """Trains one model.

    Attributes:
        name: Names the model in messages.
        steps: Position in the schedule: optimiser steps that were made, skipped or passed over.
        skipped_steps: Those that were skipped because they were not finite.
        max_grad_norm: Bound of the global gradient norm; None for none.
        lr_factor: Multiplies the scheduled learning rate. The trainer sets it; it is not part of
            the state.
        forward_context: Entered for every forward pass (gradient checkpointing).
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimizerConfig,
        total_steps: int,
        name: str,
        warmup_steps: int | None,
    ) -> None:
        """Begin the schedule.

        ``warmup_steps`` replaces the share of steps that ``config`` sets.
        """
        use_kernels(model)  # as loading does: a caller's model in memory may come from elsewhere
        self.model, self.name = model, name
        self.config, self.total_steps, self.warmup_steps = config, total_steps, warmup_steps
        self.max_grad_norm = config.max_grad_norm
        self.lr_factor = 1.0
        self.steps = self.skipped_steps = self.passed_over_steps = self.nonfinite_in_a_row = 0
        self.forward_context: Callable[[], AbstractContextManager[None]] = nullcontext

    def forward(self, compute: Callable[[], Result]) -> Result:
        """Run ``compute``, a forward pass of the model, and return its result.

        Every rank makes the same number of passes.
        """
        with self.forward_context():
            return compute()

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Add the gradient of ``loss`` (a scalar).

        If the loss is not finite, this step is skipped.
        """

    @abstractmethod
    def grad_norm(self) -> float:
        """Global L2 norm of the gradients over all parameters and ranks.

        NaN if the step will be skipped.
        """

    @abstractmethod
    def apply(self, grad_norm: float, scale: float) -> StepResult:
        """Step with gradients times ``scale``, or skip it when ``grad_norm`` is not finite.

        Gradients are cleared.

        Raises:
            TrainingPaused: Three steps in a row were skipped.
        """

    def step(self) -> StepResult:
        """Clip by the global norm and step; ``TrainingPaused`` as for :meth:`apply`."""
        norm = self.grad_norm()
        return self.apply(norm, clip_scale(norm, self.max_grad_norm))

    def pass_over_step(self) -> None:
        """Advance the schedule past a planned step that is not made."""
        self.steps += 1
        self.passed_over_steps += 1

    def gathered_parameters(self) -> AbstractContextManager[None]:
        """Gather full parameters on every rank for no-grad forwards."""
        return nullcontext()

    def reader(self) -> Any:
        """The model for passes that all ranks make outside of training steps.

        None where weights are not sharded.
        """
        return None

    @abstractmethod
    def state(self) -> tuple[dict[str, Piece], dict[str, Any]]:
        """All that a resumed run needs, under names that no engine or number of ranks changes.

        Returns:
            This rank's pieces of the weights (``weights.NAME``) and AdamW moments
            (``optimizer.NAME.SLOT``) of the parameters that are trained, in float32 where the
            engine keeps them so; the ranks' pieces make up each tensor once, and are the engine's
            own memory: copy them before it goes on. And the counters, as JSON.
        """

    @abstractmethod
    def load_state(self, tensors: SavedTensors, meta: dict[str, Any]) -> None:
        """Restore what all ranks of some engine gave as :meth:`state`; gradients are cleared.

        Raises:
            CheckpointError: It is of another model.
        """

    @abstractmethod
    def trained_weights(self) -> dict[str, Tensor]:
        """Trained parameters by name, tied ones once, on the CPU of rank 0.

        They are in the model's precision.
        """

    @abstractmethod
    def release(self) -> nn.Module:
        """Return the trained model as a plain module of one process.

        The engine cannot be used afterwards.
        """

    @property
    def optimizer_steps(self) -> int:
        """Steps that changed the weights."""
        return self.steps - self.skipped_steps - self.passed_over_steps

    def rate(self) -> float:
        """Learning rate of the step that comes next."""
        return self.lr_factor * lr_at(self.steps, self.total_steps, self.config, self.warmup_steps)

    def counted(self, grad_norm: float, rate: float, reason: str = "") -> StepResult:
        """Count one step.

        A skipped one counts in the schedule too: the rate is a function of the step's number.

        Args:
            rate: Its learning rate.
            reason: Why it was skipped, if not for ``grad_norm``.

        Raises:
            TrainingPaused: Three steps in a row were skipped.
        """
        finite = math.isfinite(grad_norm)
        self.steps += 1
        self.skipped_steps += not finite
        self.nonfinite_in_a_row = 0 if finite else self.nonfinite_in_a_row + 1
        if self.nonfinite_in_a_row >= MAX_NONFINITE_IN_A_ROW:
            nonfinite = (
                name for name, p in self.model.named_parameters() if not bool(p.isfinite().all())
            )
            first = next(nonfinite, None)
            weights = (
                "weights are still finite"
                if first is None
                else f"weights already non-finite, first in {first}"
            )
            raise TrainingPaused(
                f"{self.name}: {MAX_NONFINITE_IN_A_ROW} steps in a row were not finite (last: "
                f"{reason or f'gradient norm {grad_norm}'}, at step {self.steps}, learning rate {rate:.3g}; {weights})."
                " Likely cause: exploding gradients or a bad row. Lower optimizer.lr, tighten optimizer.max_grad_norm, "
                "and look at the last rows of the history"
            )
        return StepResult(grad_norm, not finite, rate)

    def counters(self) -> dict[str, int]:
        """The counters as JSON."""
        return {name: getattr(self, name) for name in COUNTERS}

    def load_counters(self, meta: dict[str, Any]) -> None:
        for name in COUNTERS:
            setattr(self, name, int(meta[name]))

    def parameters_of(self, tensors: SavedTensors) -> dict[str, nn.Parameter]:
        """The trained parameters by name.

        ``CheckpointError`` unless the saved state is of a model with these.
        """
        parameters = trained_parameters(self.model)
        weights = {
            key.removeprefix("weights.") for key in tensors.names if key.startswith("weights.")
        }
        if weights != parameters.keys():
            wrong = sorted(weights.symmetric_difference(parameters))[0]
            raise CheckpointError(
                f"the saved state of {self.name} is of another model (it differs in {wrong})"
            )
        return parameters


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return by name the parameters that training changes.

    Frozen ones are those of the model that it began with.
    """
    return {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }


def clip_scale(norm: float, max_norm: float | None) -> float:
    """The factor that scales gradients of norm ``norm`` to ``max_norm``.

    It is ``min(1, max_norm / (norm + 1e-6))``.
    """
    if max_norm is None or not math.isfinite(norm):
        return 1.0
    return min(1.0, max_norm / (norm + 1e-6))


def joint_step(engines: Sequence[Engine], max_norm: float | None) -> list[StepResult]:
    """Step several engines under a common gradient norm.

    MOSS-RLHF wraps policy and critic in one optimiser.

    All of them are skipped when one is not finite. ``StepResult.grad_norm`` is the joint norm.
    """
    norms = [engine.grad_norm() for engine in engines]
    norm = math.sqrt(sum(norm * norm for norm in norms))  # not finite if any of them is not
    return [engine.apply(norm, clip_scale(norm, max_norm)) for engine in engines]


class MasterWeights:
    """Float32 copies of the trainable low-precision parameters of a model.

    A float32 model has none.

    bfloat16 has 8 significant bits, so that a step of less than 1/512 of a weight rounds to
    nothing: AdamW at a rate of 5e-7 leaves nearly all weights of a bfloat16 model where they are,
    however many steps it makes. Steps are therefore made in float32 and add up there, and so do
    moments and the gradients of micro-batches (Micikevicius et al. 2018, "Mixed Precision
    Training", section 3.1).

    While it exists, every gradient that a backward pass leaves at such a parameter is added to the
    copy's gradient and freed. :meth:`detach` ends that.
    """

    def __init__(self, model: nn.Module, optimizer: optim.Optimizer) -> None:
        """Copy the weights, and let ``optimizer`` update the copies.

        It was built for the model's own.
        """
        low = [p for p in model.parameters() if p.requires_grad and p.dtype in LOW_PRECISION]
        self.copies = {parameter: nn.Parameter(parameter.detach().float()) for parameter in low}
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._take_gradient) for parameter in low
        ]
        for group in optimizer.param_groups:
            group["params"] = [self.of(parameter) for parameter in group["params"]]

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        """The float32 copy of a parameter, or the parameter itself where it has none."""
        return self.copies.get(parameter, parameter)

    def _take_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        master = self.copies[parameter]  # type: ignore[index]
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad += parameter.grad
        parameter.grad = None

    @torch.no_grad()
    def round_to_model(self) -> None:
        """Set the model's weights to the copies, rounded to the model's precision."""
        if self.copies:  # one launch on a GPU in place of one for each parameter
            torch._foreach_copy_([*self.copies], [*self.copies.values()])

    def detach(self) -> None:
        """Forget the copies; later gradients stay at the model's own parameters."""
        for hook in self._hooks:
            hook.remove()
        self.copies = {}


class LocalEngine(Engine):
    """Plain torch: the whole model, its gradients and its optimiser on every rank.

    Gradients are summed once a step.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimizerConfig,
        total_steps: int,
        name: str = "model",
        warmup_steps: int | None = None,
        build: OptimizerBuilder = build_adamw,
    ) -> None:
        """Move the model to the device, and build its optimiser by ``build``."""
        super().__init__(model.to(distributed.device()), config, total_steps, name, warmup_steps)
        self.optimizer = build(model, config)
        self.masters = MasterWeights(model, self.optimizer)
        self.parameters = [self.masters.of(p) for p in model.parameters() if p.requires_grad]
        self.losses: list[Tensor] = []  # of the passes since the last step
        self.skip_reason = ""
        self.nonfinite: Tensor | None = (
            None  # count over ranks of losses that are not finite; None before reduction
        )

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        self.losses.append(loss.detach())

    def grad_norm(self) -> float:
        gradients = self._gradients()
        losses = torch.stack(
            [loss.double() for loss in self.losses] or [torch.zeros((), dtype=torch.float64)]
        )
        if self.nonfinite is None:
            self.nonfinite = (~losses.isfinite()).sum(dtype=torch.float32)
            distributed.all_reduce_sums([*gradients, self.nonfinite])
        norm = (
            torch.nn.utils.get_total_norm(gradients)
            if gradients
            else torch.zeros_like(self.nonfinite)
        )
        # The host waits for the device here, once a step.
        nonfinite, value, *own = torch.stack(
            [self.nonfinite.double(), norm.double(), *losses]
        ).tolist()
        self.skip_reason = next((f"loss {loss}" for loss in own if not math.isfinite(loss)), "")
        return math.nan if nonfinite else float(value)

    def apply(self, grad_norm: float, scale: float) -> StepResult:
        rate, reason = self.rate(), self.skip_reason
        if math.isfinite(grad_norm):
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            gradients = self._gradients()
            if scale != 1.0 and gradients:
                torch._foreach_mul_(gradients, scale)
            self.optimizer.step()
            self.masters.round_to_model()
        self._clear()
        return self.counted(grad_norm, rate, reason)

    def _clear(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.losses, self.skip_reason, self.nonfinite = [], "", None

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None]

    def state(self) -> tuple[dict[str, Piece], dict[str, Any]]:
        tensors = {}
        for name, parameter in trained_parameters(self.model).items():
            updated = self.masters.of(parameter)
            tensors[f"weights.{name}"] = updated.detach()
            for slot, value in self.optimizer.state.get(updated, {}).items():
                if slot in OPTIMIZER_SLOTS:
                    tensors[f"optimizer.{name}.{slot}"] = value.detach()
        return pieces_of_rank(tensors), self.counters()

    def load_state(self, tensors: SavedTensors, meta: dict[str, Any]) -> None:
        self._clear()
        parameters, saved = self.parameters_of(tensors), tensors.names
        for name, parameter in parameters.items():
            updated = self.masters.of(parameter)
            with torch.no_grad():
                updated.copy_(tensors.whole(f"weights.{name}"))
            keys = {slot: f"optimizer.{name}.{slot}" for slot in OPTIMIZER_SLOTS}
            moments = {
                slot: tensors.whole(key).to(parameter.device, copy=True)
                for slot, key in keys.items()
                if key in saved
            }
            if moments:
                self.optimizer.state[updated] = moments
            else:
                self.optimizer.state.pop(updated, None)
        self.masters.round_to_model()
        self.load_counters(meta)

    def trained_weights(self) -> dict[str, Tensor]:
        if not distributed.is_rank_zero():
            return {}
        return {
            name: p.detach().cpu().clone() for name, p in trained_parameters(self.model).items()
        }

    def release(self) -> nn.Module:
        """Return the model itself; gradients, moments and float32 copies are freed."""
        self._clear()
        self.optimizer.state.clear()
        self.optimizer.param_groups.clear()
        self.masters.detach()
        self.parameters = []
        return self.model
