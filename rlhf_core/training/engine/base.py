"""The interface of engines: an engine owns a model, its optimiser and its schedule, on one process or many.

Losses handed to ``backward`` are already divided by the totals of the whole optimiser step over all ranks
(algorithms.md §6), so that gradients of several calls and of several ranks add up, and neither micro-batches nor the
number of ranks change the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn, optim

from rlhf_core.config.model import OptimizerConfig
from rlhf_core.errors import TrainingPaused
from rlhf_core.training.checkpoints.checkpoint import Piece, SavedTensors


def warmup_length(total_steps: int, config: OptimizerConfig, warmup_steps: int | None = None) -> int:
    """Steps of linear warm-up: ``warmup_steps`` where given, else the configured share of all steps, rounded up."""
    return warmup_steps if warmup_steps is not None else math.ceil(config.warmup * total_steps)


def lr_at(step: int, total_steps: int, config: OptimizerConfig, warmup_steps: int | None = None) -> float:
    """Learning rate of optimiser step ``step``, counted from 0, of ``total_steps``.

    Warm-up rises linearly and reaches the peak in its last step. Then ``cosine`` falls to ``final_ratio`` of the peak
    (algorithms.md §1), ``inverse_sqrt`` is ``lr * sqrt(warmup / step)`` and ``constant`` stays.
    """
    warmup = warmup_length(total_steps, config, warmup_steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.schedule == "inverse_sqrt":
        return config.lr * math.sqrt(max(warmup, 1) / max(warmup, step, 1))
    if config.schedule == "constant":
        return config.lr
    progress = min((step - warmup) / max(total_steps - warmup, 1), 1.0)
    floor = config.final_ratio
    return config.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


def build_adamw(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; norms and biases (fewer than two dimensions) do not decay.

    The fused form makes one pass per parameter on CPU and GPU, a tenth of the step's time for a tiny model.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    filled = [group for group in groups if group["params"]]
    return torch.optim.AdamW(filled, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


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


@dataclass(frozen=True)
class EngineState:
    """All that a resumed run needs, under names that are the same for every engine and number of ranks.

    Attributes:
        pieces: This rank's pieces of the weights (``weights.NAME``) and AdamW moments (``optimizer.NAME.SLOT``) of the
            parameters that are trained, in float32 where the engine keeps them so. The ranks' pieces make up each
            tensor once. They are the engine's own memory: copy them before it goes on.
        meta: Counters, as JSON.
    """

    pieces: dict[str, Piece]
    meta: dict[str, Any]


class Engine(Protocol):
    """Trains one model.

    Attributes:
        name: Names the model in messages.
        steps: Position in the schedule: optimiser steps that were made, skipped or passed over.
        skipped_steps: Those that were skipped because they were not finite.
        max_grad_norm: Bound of the global gradient norm; None for none.
        lr_factor: Multiplies the scheduled learning rate. The trainer sets it; it is not part of the state.
        forward_context: Entered for every forward pass (gradient checkpointing).
    """

    model: nn.Module
    name: str
    steps: int
    skipped_steps: int
    max_grad_norm: float | None
    lr_factor: float
    forward_context: Callable[[], AbstractContextManager[None]]

    def forward(self, compute: Callable[[], Result]) -> Result:
        """Run ``compute``, a forward pass of the model, and return its result. Every rank makes the same number."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of ``loss`` (a scalar). If the loss is not finite, this step is skipped."""

    def grad_norm(self) -> float:
        """Global gradient norm over all parameters and ranks; NaN if the step will be skipped."""

    def apply(self, grad_norm: float, scale: float) -> StepResult:
        """Step with gradients times ``scale``, or skip it when ``grad_norm`` is not finite; gradients are cleared."""

    def step(self) -> StepResult:
        """Clip by the global norm and step."""

    def pass_over_step(self) -> None:
        """Advance the schedule past a planned step that is not made."""

    def gathered_parameters(self) -> AbstractContextManager[None]:
        """Gather full parameters on every rank for no-grad forwards."""

    def state(self) -> EngineState:
        """This rank's part of weights and optimiser state, and the counters."""

    def load_state(self, tensors: SavedTensors, meta: dict[str, Any]) -> None:
        """Restore what all ranks of some engine gave as :meth:`state`; gradients are cleared.

        Raises:
            CheckpointError: It is of another model.
        """

    def trained_weights(self) -> dict[str, Tensor]:
        """Trained parameters by name, gathered from all ranks, on the CPU of rank 0; empty on the others."""

    def release(self) -> nn.Module:
        """Return the trained model as a plain module of one process; the engine cannot be used afterwards."""


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return by name the parameters that training changes; frozen ones are those of the model that it began with."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


class StepCount:
    """Step counters and learning-rate schedule, common to all engines."""

    name: str
    model: nn.Module

    def __init__(self, config: OptimizerConfig, total_steps: int, warmup_steps: int | None) -> None:
        self.config, self.total_steps, self.warmup_steps = config, total_steps, warmup_steps
        self.max_grad_norm = config.max_grad_norm
        self.lr_factor = 1.0
        self.steps = self.skipped_steps = self.passed_over_steps = self.nonfinite_in_a_row = 0
        self.forward_context: Callable[[], AbstractContextManager[None]] = nullcontext

    def rate(self) -> float:
        """Learning rate of the step that comes next."""
        return self.lr_factor * lr_at(self.steps, self.total_steps, self.config, self.warmup_steps)

    def count(self, finite: bool) -> None:
        """Count one step. A skipped one counts in the schedule too: the rate is a function of the step's number."""
        self.steps += 1
        self.skipped_steps += not finite
        self.nonfinite_in_a_row = 0 if finite else self.nonfinite_in_a_row + 1

    def pass_over_step(self) -> None:
        """Advance the schedule past a planned step that is not made."""
        self.steps += 1
        self.passed_over_steps += 1

    @property
    def optimizer_steps(self) -> int:
        """Steps that changed the weights."""
        return self.steps - self.skipped_steps - self.passed_over_steps

    def pause_after_repeated_skips(self, reason: str, rate: float, nonfinite: Sequence[str]) -> None:
        """Raise ``TrainingPaused`` after three skipped steps in a row.

        Args:
            reason: Why the last one was skipped.
            rate: Its learning rate.
            nonfinite: Names of parameters that are not finite.
        """
        if self.nonfinite_in_a_row < MAX_NONFINITE_IN_A_ROW:
            return
        weights = f"weights already non-finite, first in {nonfinite[0]}" if nonfinite else "weights are still finite"
        raise TrainingPaused(
            f"{self.name}: {MAX_NONFINITE_IN_A_ROW} steps in a row were not finite (last: {reason}, at step "
            f"{self.steps}, learning rate {rate:.3g}; {weights}). Likely cause: exploding gradients or a bad row. "
            "Lower optimizer.lr, tighten optimizer.max_grad_norm, and look at the last rows of the history"
        )

    def counters(self) -> dict[str, int]:
        """The counters as JSON."""
        return {
            "steps": self.steps,
            "skipped_steps": self.skipped_steps,
            "passed_over_steps": self.passed_over_steps,
            "in_a_row": self.nonfinite_in_a_row,
        }

    def load_counters(self, meta: dict[str, Any]) -> None:
        self.steps = int(meta["steps"])
        self.skipped_steps = int(meta["skipped_steps"])
        self.passed_over_steps = int(meta["passed_over_steps"])
        self.nonfinite_in_a_row = int(meta["in_a_row"])


def clip_scale(norm: float, max_norm: float | None) -> float:
    """Factor that scales gradients of global norm ``norm`` to ``max_norm``: ``min(1, max_norm / (norm + 1e-6))``."""
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
