"""Checkpoint selection during training: evaluate every few iterations, and keep the weights of the best checkpoint."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedModel

from rlhf_core.ppo.callbacks.callback import IterationRecord, TrainerCallback, TrainerContext
from rlhf_core.ppo.checkpoints.run_checkpoint import prune_best, save_best

SAMPLES = 8
# Of the selection's metrics these keep their names; the others would collide with those of the rollout.
SELECTION_METRICS = ("win_rate", "win_rate_low95", "win_rate_high95", "referee_gap")


@dataclass(frozen=True)
class SelectionResult:
    """What a selector says of one checkpoint: its metrics, and whether it is the one to keep so far."""

    metrics: dict[str, float]
    keep: bool


class Selector(Protocol):
    """Judges checkpoints on fixed prompts. The trainer knows neither judges nor limits."""

    def consider(self, iteration: int, policy: PreTrainedModel) -> SelectionResult:
        """Evaluate the policy after ``iteration`` (from 1)."""

    def state(self) -> dict[str, Any]:
        """What later results depend on, as JSON."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Undo :meth:`state`."""


class SelectionCallback(TrainerCallback):
    """Considers the policy every ``every`` iterations and after the last one, and keeps the best weights in ``folder``.

    Sample replies of the same iterations go to the trainer's ``samples``.
    """

    name = "selection"

    def __init__(self, selector: Selector, every: int, folder: Path) -> None:
        self.selector, self.every, self.folder = selector, every, folder
        self.best = 0

    def after_update(self, trainer: TrainerContext, record: IterationRecord) -> None:
        """Consider the checkpoint, unless steps kept being non-finite."""
        due = record.iteration % self.every == 0 or record.iteration == trainer.config.iterations
        if not due or record.paused is not None:
            return
        started, pair = time.perf_counter(), trainer.learner.pair
        with trainer.frozen.on_device(), pair.engines["policy"].gathered_parameters():
            result = self.selector.consider(record.iteration, pair.policy)
        weights = pair.policy_weights() if result.keep else None
        self.best = record.iteration if result.keep else self.best
        # A checkpoint that the run may go back to refers to the best weights of its time.
        needed = {meta["callbacks"][self.name]["best"] for meta in trainer.checkpoints.metas().values()} | {self.best}

        def write() -> None:
            if weights is not None:
                save_best(self.folder, record.iteration, weights)
            prune_best(self.folder, needed)

        trainer.checkpoints.manager.attach(write)
        record.metrics |= {
            name if name in SELECTION_METRICS else f"selection_{name}": value for name, value in result.metrics.items()
        }
        record.seconds["seconds_selection"] = time.perf_counter() - started
        rows = zip(record.prompts, record.replies, record.experience.rewards.tolist(), strict=True)
        for prompt, reply, reward in list(rows)[:SAMPLES]:
            trainer.samples.append({"iteration": record.iteration, "prompt": prompt, "reply": reply, "score": reward})

    def state(self) -> dict[str, Any]:
        """The selector's state and the best iteration so far."""
        return {"selector": self.selector.state(), "best": self.best}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Undo :meth:`state`."""
        self.selector.load_state(state["selector"])
        self.best = int(state["best"])
