"""An engine owns a model, its optimiser and its schedule, and hides whether one process trains it or many.

Losses handed to ``backward`` are already divided by the totals of the whole optimiser step (algorithms.md §6), so
the gradients of several calls simply add up and micro-batches never change the result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rlhf_core.config.model import OptimizerConfig
from rlhf_core.errors import CheckpointError, TrainingPaused
from rlhf_core.training.optim import build_adamw, lr_at

MAX_NONFINITE_IN_A_ROW = 3
OPTIMIZER_SLOTS = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True)
class StepResult:
    """``grad_norm`` is the global norm before clipping, non-finite in a skipped step. ``lr`` is that step's rate."""

    grad_norm: float
    skipped: bool
    lr: float


@dataclass(frozen=True)
class EngineState:
    """All that a resumed run needs: ``tensors`` under flat names, ``meta`` of plain JSON values."""

    tensors: dict[str, Tensor]
    meta: dict[str, Any]


class Engine(Protocol):
    """What trainers know. ``steps`` counts optimiser steps, ``skipped_steps`` those of them that were skipped.

    ``lr_factor`` multiplies the scheduled rate; it is the trainer's to set, and no part of the state.
    """

    model: nn.Module
    name: str
    steps: int
    skipped_steps: int
    max_grad_norm: float | None
    lr_factor: float

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of ``loss`` (a scalar). A non-finite loss condemns the step instead."""

    def grad_norm(self) -> float:
        """Global gradient norm over all parameters and ranks; NaN when the step is condemned."""

    def apply(self, grad_norm: float, scale: float) -> StepResult:
        """Step with gradients times ``scale``, or skip it when ``grad_norm`` is not finite; gradients are cleared."""

    def step(self) -> StepResult:
        """Clip by the global norm and step."""

    def state(self) -> EngineState:
        """Weights, optimiser state and counters."""

    def load_state(self, state: EngineState) -> None:
        """The inverse of :meth:`state`."""

    def full_weights(self) -> dict[str, Tensor]:
        """All parameters by name, gathered from all ranks, on the CPU."""


class LocalEngine:
    """Plain torch in one process."""

    def __init__(
        self,
        model: nn.Module,
        config: OptimizerConfig,
        total_steps: int,
        name: str = "model",
        warmup_steps: int | None = None,
    ) -> None:
        """``warmup_steps`` takes the place of the configured share. ``name`` appears in messages."""
        self.model, self.config, self.total_steps, self.name = model, config, total_steps, name
        self.warmup_steps = warmup_steps
        self.max_grad_norm = config.max_grad_norm
        self.lr_factor = 1.0
        self.optimizer = build_adamw(model, config)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.steps = self.skipped_steps = self.nonfinite_in_a_row = 0
        self.condemned: str | None = None

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of ``loss`` (a scalar). A non-finite loss condemns the step instead."""
        if not math.isfinite(value := float(loss.detach())):
            self.condemned = f"loss {value}"
        elif self.condemned is None:
            loss.backward()

    def grad_norm(self) -> float:
        """Global gradient norm (L2 over all parameters); NaN when a loss of this step was not finite."""
        if self.condemned is not None:
            return math.nan
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0

    def apply(self, grad_norm: float, scale: float) -> StepResult:
        """Step with gradients times ``scale``, or skip it when ``grad_norm`` is not finite; gradients are cleared.

        A skipped step counts in the schedule: the rate stays a function of the trainer's step number.
        ``TrainingPaused`` after three skipped steps in a row.
        """
        rate = self.lr_factor * lr_at(self.steps, self.total_steps, self.config, self.warmup_steps)
        self.steps += 1
        finite = math.isfinite(grad_norm)
        if finite:
            self._optimise(rate, scale)
            self.nonfinite_in_a_row = 0
        else:
            self.skipped_steps += 1
            self.nonfinite_in_a_row += 1
        reason = self.condemned or f"gradient norm {grad_norm}"
        self.optimizer.zero_grad(set_to_none=True)
        self.condemned = None
        if self.nonfinite_in_a_row >= MAX_NONFINITE_IN_A_ROW:
            raise TrainingPaused(self._diagnosis(reason, rate))
        return StepResult(grad_norm, not finite, rate)

    def _optimise(self, rate: float, scale: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if scale != 1.0 and gradients:
            torch._foreach_mul_(gradients, scale)
        self.optimizer.step()

    def _diagnosis(self, reason: str, rate: float) -> str:
        broken = [name for name, p in self.model.named_parameters() if not bool(p.isfinite().all())]
        weights = f"weights already non-finite, first in {broken[0]}" if broken else "weights are still finite"
        return (
            f"{self.name}: {MAX_NONFINITE_IN_A_ROW} steps in a row were not finite (last: {reason}, at step "
            f"{self.steps}, learning rate {rate:.3g}; {weights}). Likely cause: exploding gradients or a bad row. "
            "Lower optimizer.lr, tighten optimizer.max_grad_norm, and look at the last rows of the history"
        )

    def step(self) -> StepResult:
        """Clip by the global norm and step."""
        norm = self.grad_norm()
        return self.apply(norm, clip_scale(norm, self.max_grad_norm))

    def state(self) -> EngineState:
        """Copies of weights (``weights.NAME``) and AdamW moments (``optimizer.NAME.SLOT``), and the counters."""
        tensors = {f"weights.{name}": tensor for name, tensor in self.full_weights().items()}
        for name, parameter in self.model.named_parameters():
            for slot, value in self.optimizer.state.get(parameter, {}).items():
                if slot in OPTIMIZER_SLOTS:
                    tensors[f"optimizer.{name}.{slot}"] = value.detach().cpu().clone()
        meta = {"steps": self.steps, "skipped_steps": self.skipped_steps, "in_a_row": self.nonfinite_in_a_row}
        return EngineState(tensors, meta)

    def load_state(self, state: EngineState) -> None:
        """The inverse of :meth:`state`; gradients are cleared. ``CheckpointError`` when it is of another model."""
        self.optimizer.zero_grad(set_to_none=True)
        self.condemned = None
        parameters = dict(self.model.named_parameters())
        saved = {name.removeprefix("weights.") for name in state.tensors if name.startswith("weights.")}
        if saved != set(parameters):
            wrong = sorted(saved.symmetric_difference(parameters))[0]
            raise CheckpointError(f"the saved state of {self.name} is of another model (it differs in {wrong})")
        for name, parameter in parameters.items():
            with torch.no_grad():
                parameter.copy_(state.tensors[f"weights.{name}"])
            self._load_moments(name, parameter, state.tensors)
        self.steps = int(state.meta["steps"])
        self.skipped_steps = int(state.meta["skipped_steps"])
        self.nonfinite_in_a_row = int(state.meta["in_a_row"])

    def _load_moments(self, name: str, parameter: nn.Parameter, tensors: Mapping[str, Tensor]) -> None:
        keys = {slot: f"optimizer.{name}.{slot}" for slot in OPTIMIZER_SLOTS}
        moments = {slot: tensors[key].to(parameter.device).clone() for slot, key in keys.items() if key in tensors}
        if moments:
            self.optimizer.state[parameter] = moments
        else:
            self.optimizer.state.pop(parameter, None)

    def full_weights(self) -> dict[str, Tensor]:
        """All parameters by name (tied ones once), as copies on the CPU."""
        return {name: p.detach().cpu().clone() for name, p in self.model.named_parameters()}


def clip_scale(norm: float, max_norm: float | None) -> float:
    """Factor that brings gradients of global norm ``norm`` down to ``max_norm``: ``min(1, max / (norm + 1e-6))``."""
    if max_norm is None or not math.isfinite(norm):
        return 1.0
    return min(1.0, max_norm / (norm + 1e-6))


def joint_norm(norms: Sequence[float]) -> float:
    """L2 norm of the concatenated gradients of several engines; not finite if any of them is not."""
    return math.sqrt(sum(norm * norm for norm in norms))


def joint_step(engines: Sequence[Engine], max_norm: float | None) -> list[StepResult]:
    """One step of several engines under a common norm (MOSS-RLHF wraps policy and critic in one optimiser).

    All of them are skipped when one is not finite. ``StepResult.grad_norm`` is the joint norm.
    """
    norm = joint_norm([engine.grad_norm() for engine in engines])
    return [engine.apply(norm, clip_scale(norm, max_norm)) for engine in engines]
