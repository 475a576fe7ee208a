"""The resumable loop of supervised training: steps, records, evaluations and checkpoints.

A step is a function of its number, the seed and the restored state, so that a run killed at any moment and started
again ends with the same weights and history, bit for bit on a CPU.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rlhf_core.config.model import CheckpointConfig, OptimizerConfig
from rlhf_core.errors import TrainingPaused
from rlhf_core.runtime.progress import Progress, progress
from rlhf_core.training.checkpoints.manager import CheckpointManager, RunCheckpoints
from rlhf_core.training.engine.base import Engine
from rlhf_core.training.engine.factory import Model, build_engine, finish
from rlhf_core.training.history import CLOCK_FIELDS, Block, History
from rlhf_core.training.rng import derive_seed, seed_everything
from rlhf_core.training.run_context import RunContext

RECORD_EVERY = 10


@dataclass(frozen=True)
class StepReport:
    """What a task reports of one step.

    Attributes:
        metrics: What is averaged over a block of steps.
        tokens: Tokens it trained on.
        padding_share: Share of padding in the positions that all ranks computed. Unlike the metrics it depends on
            their number. None where it is not measured.
    """

    metrics: dict[str, float]
    tokens: int
    padding_share: float | None = None


class Task(Protocol):
    """A supervised objective: its gradients and its evaluation."""

    def train_step(self, step: int) -> StepReport:
        """Put the gradients of optimiser step ``step`` (from 0) into the engine."""

    def evaluate(self) -> dict[str, float]:
        """Metrics of the current model on held-out data."""


class LoopConfig(Protocol):
    """Length and rhythm of a run, and its optimiser."""

    @property
    def steps(self) -> int: ...

    @property
    def eval_every(self) -> int:
        """Steps between evaluations; there is one before the first and one after the last step too."""

    @property
    def optimizer(self) -> OptimizerConfig: ...

    @property
    def checkpoint(self) -> CheckpointConfig: ...


def train(
    model: Model, task: Callable[[Engine], Task], config: LoopConfig, name: str, seed: int, context: RunContext
) -> tuple[Model, LoopResult]:
    """Train ``model`` in place and return it whole, without an engine. Of several ranks only rank 0 returns.

    Args:
        task: Makes the objective of an engine of ``model``.
        name: Sets the run's random streams apart and titles its progress.

    Raises:
        TrainingPaused, CheckpointError, Preempted: See :meth:`Loop.run`.
    """
    engine = build_engine(model, config.optimizer, config.steps, name, context)
    result = Loop(engine, task(engine), config, name, seed, context).run()
    return finish(engine, model), result


@dataclass(frozen=True)
class LoopResult:
    """The whole history, that of the part before a resume included, and the cost of all training steps."""

    history: list[dict[str, Any]]
    tokens: int
    seconds: float
    skipped_steps: int

    @property
    def tokens_per_second(self) -> float:
        """Tokens trained on per second, evaluations and checkpoints not counted."""
        return self.tokens / max(self.seconds, 1e-9)

    def mean(self, metric: str) -> float | None:
        """The mean of a training metric over all steps; None where no record has it."""
        total, steps, last = 0.0, 0, 0
        for record in self.history:
            if record.get(metric) is not None:
                total += (record["step"] - last) * record[metric]
                steps += record["step"] - last
            last = record["step"]
        return total / steps if steps else None

    def evaluations(self) -> list[dict[str, Any]]:
        """The records with metrics on held-out data, first to last."""
        return [record for record in self.history if any(name.startswith("validation_") for name in record)]


class Loop:
    """One run. Checkpoints and history of an interrupted run in ``context.work`` are resumed."""

    def __init__(
        self, engine: Engine, task: Task, config: LoopConfig, name: str, seed: int, context: RunContext
    ) -> None:
        self.engine, self.task, self.config, self.context = engine, task, config, context
        self.name, self.seed = name, seed
        self.history = History(context.work / "history.jsonl")
        manager = CheckpointManager(context.work / "checkpoints", context.store)
        keep = config.checkpoint.keep
        self.checkpoints = RunCheckpoints(manager, {"engine": engine}, {"history": self.history}, keep)
        self.block = Block()
        self.done = self.tokens = 0
        self.saved = 0  # the step that the newest checkpoint is of
        self.seconds = 0.0

    def run(self) -> LoopResult:
        """Train to the last step.

        Raises:
            TrainingPaused: Three steps in a row were not finite; the history is written.
            CheckpointError: A checkpoint could not be written.
            Preempted: SIGTERM came; the step was finished and the state saved.
        """
        self._restore()
        if self.done == 0:
            self._record(self._evaluation())
        preemption = self.context.preemption
        with (
            self.checkpoints.manager as manager,
            progress(self.config.steps, self.name, self.done) as bar,
            preemption.deferred(),
        ):
            while not (preempted := preemption.requested()) and self.done < self.config.steps:
                self._step(bar)
                manager.check()
            if preempted:
                if self.done > self.saved:
                    self._save()
                manager.finish()
                steps = f"{self.name} made step {self.done} of {self.config.steps}"
                preemption.raise_preempted(steps, saved=self.done > 0)
        return LoopResult(self.history.rows(), self.tokens, self.seconds, self.engine.skipped_steps)

    def _step(self, bar: Progress) -> None:
        started = time.perf_counter()
        self.engine.model.train()
        report = self.task.train_step(self.done)
        try:
            result = self.engine.step()
        except TrainingPaused as paused:
            self._record({"skipped_steps": self.engine.skipped_steps})
            raise TrainingPaused(f"{paused} ({self.history.path})") from paused
        # Loss and norm belong to the same weights: both were taken before the update.
        self.block.add(report.metrics | {"grad_norm": result.grad_norm})
        if report.padding_share is not None:
            self.block.add({"padding_share": report.padding_share})
        self.done += 1
        self.tokens += report.tokens
        self.seconds += time.perf_counter() - started
        self._after_step(result.lr)
        bar.advance(loss=report.metrics["loss"], tokens_s=self.tokens / self.seconds)

    def _after_step(self, rate: float) -> None:
        """Record, evaluate and save where the step number says so."""
        last = self.done == self.config.steps
        evaluating = last or self.done % self.config.eval_every == 0
        saving = last or self.done % self.config.checkpoint.every == 0
        if evaluating or saving or self.done % RECORD_EVERY == 0:
            # A record closes its block, so that only the checkpoint of a preempted run falls inside one.
            metrics = {"lr": rate, "skipped_steps": self.engine.skipped_steps}
            self._record(metrics | (self._evaluation() if evaluating else {}))
        if saving:
            self._save()

    def _evaluation(self) -> dict[str, float]:
        self.engine.model.eval()
        with self.engine.gathered_parameters():
            return {f"validation_{name}": value for name, value in self.task.evaluate().items()}

    def _record(self, metrics: Mapping[str, float]) -> None:
        record: dict[str, Any] = {"step": self.done, **self.block.means(), **metrics, "tokens": self.tokens}
        if self.seconds:
            record |= dict(zip(CLOCK_FIELDS, (self.seconds, self.tokens / self.seconds), strict=True))
        self.history.append(record)
        self._track(record)

    def _track(self, record: Mapping[str, Any]) -> None:
        numbers = {name: value for name, value in record.items() if name != "step" and value is not None}
        finite = {name: float(value) for name, value in numbers.items() if math.isfinite(value)}
        self.context.tracker.log_metrics(finite, step=int(record["step"]))

    def _save(self) -> None:
        self.checkpoints.save(self.done, {"tokens": self.tokens, "seconds": self.seconds, "block": self.block.state()})
        self.saved = self.done

    def _restore(self) -> None:
        """Continue from the newest sound checkpoint, or start from step 0."""
        restored = self.checkpoints.load()
        if restored is None:
            seed_everything(derive_seed(self.seed, self.name, "process"))
            return
        self.done, meta = restored
        self.saved, self.tokens, self.seconds = self.done, int(meta["tokens"]), float(meta["seconds"])
        self.block.load_state(meta["block"])
        # The tracked run is a new one, so that it gets the whole history.
        for record in self.history.rows():
            self._track(record)
