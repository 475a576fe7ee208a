"""The interface of trainer callbacks, and the record of an iteration that they read and add to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlhf_core.config.stages.ppo import PpoConfig
from rlhf_core.errors import TrainingPaused
from rlhf_core.ppo.checkpoints.run_checkpoint import JsonLines, RunCheckpoints
from rlhf_core.ppo.experience import Experience
from rlhf_core.ppo.update import Learner
from rlhf_core.training.engine.frozen import FrozenModels
from rlhf_core.training.run_context import RunContext


@dataclass
class IterationRecord:
    """One finished iteration: what was sampled, and what the history will say of it.

    Attributes:
        iteration: Its number, from 1.
        experience: The rollout.
        prompts: The last turn of each prompt.
        replies: Each reply as text, without its end marker.
        metrics: Numbers for the history and the tracker. Callbacks may add to them.
        seconds: Time by phase. Callbacks may add to it.
        notes: Further fields of the history's row, as JSON. Callbacks may add to them.
        paused: Why the update was broken off, if steps kept being non-finite. Unless a callback rolls the run back,
            the trainer raises it after the iteration was logged.
    """

    iteration: int
    experience: Experience
    prompts: Sequence[str]
    replies: Sequence[str]
    metrics: dict[str, float]
    seconds: dict[str, float]
    notes: dict[str, Any] = field(default_factory=dict)
    paused: TrainingPaused | None = None


class TrainerContext(Protocol):
    """What callbacks may use of the trainer."""

    config: PpoConfig
    learner: Learner
    frozen: FrozenModels
    context: RunContext
    checkpoints: RunCheckpoints
    history: JsonLines
    samples: JsonLines

    def save(self) -> None:
        """Write a checkpoint of the run as it is."""

    def restore(self) -> None:
        """Go to the newest checkpoint that no rollback has abandoned."""


class TrainerCallback:
    """Base class of what is done around an iteration; each hook does nothing unless it is overridden.

    ``name`` is the key of the callback's state in checkpoints. Hooks of several callbacks are called in the order in
    which the trainer was given them.
    """

    name: str

    def on_start(self, trainer: TrainerContext) -> None:
        """Called once before the first iteration, after the newest checkpoint was restored, if there is one."""

    def after_update(self, trainer: TrainerContext, record: IterationRecord) -> None:
        """Called after an iteration's update; may add metrics and notes to the record before it is logged."""

    def after_log(self, trainer: TrainerContext, record: IterationRecord) -> None:
        """Called once the iteration is logged; may raise ``TrainingPaused`` or restore an earlier checkpoint."""

    def state(self) -> dict[str, Any]:
        """What the callback's later decisions depend on, as JSON with finite numbers."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Undo :meth:`state`."""
