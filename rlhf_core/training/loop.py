"""The resumable loop, and supervised training by it: steps, records, evaluations and checkpoints.

A step is a function of its number, the seed and the restored state, so that a run killed at any
moment and started again ends with the same weights and history, bit for bit on a CPU.
"""

from __future__ import annotations

import gc
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from rlhf_core.config.model import CheckpointConfig, EpochLimit, OptimizerConfig
from rlhf_core.errors import Preempted, RlhfError, TrainingPaused
from rlhf_core.runtime import distributed
from rlhf_core.runtime.progress import progress
from rlhf_core.training.checkpoints.manager import CheckpointManager, RunCheckpoints
from rlhf_core.training.engine.base import Engine
from rlhf_core.training.engine.factory import Model, build_engine, finish
from rlhf_core.training.history import CLOCK_FIELDS, Block, History
from rlhf_core.training.rng import derive_seed, seed_everything
from rlhf_core.training.run_context import RunContext

RECORD_EVERY = 10
ROOM = 0.9  # the share of a device's free memory that a trained model may take, which is read and samples afterwards


class ResumableLoop(ABC):
    """The turns of a training, which go on where an earlier process stopped.

    A turn is a step or an iteration.
    """

    name: str  # sets random streams apart, and titles the progress
    unit: str  # what messages call one turn of the loop
    context: RunContext
    checkpoints: RunCheckpoints
    done: int  # turns of the loop
    total: int  # turns at most

    def needs_start(self) -> bool:
        """Whether the state before the first turn is to be saved, for a rollback to go back to."""
        return False

    def finished(self) -> bool:
        """Whether no further turn is to be made."""
        return self.done >= self.total

    @abstractmethod
    def turn(self) -> dict[str, float]:
        """Make one turn of the loop and save the state where that is due.

        Returns what the progress shows.
        """

    @abstractmethod
    def meta(self) -> dict[str, Any]:
        """Return what a checkpoint must say beside weights, optimisers and generators.

        It is JSON with finite numbers.
        """

    @abstractmethod
    def load_meta(self, meta: Mapping[str, Any]) -> None:
        """Go on from what :meth:`meta` of an earlier process said."""

    def run(self) -> None:
        """Go to the last turn, resuming where an earlier process stopped.

        Raises:
            TrainingPaused: A health rule stopped the run, or steps kept being non-finite; the last
                checkpoint before that is kept, if there is one, so that the same run pauses again
                at the same place.
            Preempted: SIGTERM came; the turn was finished and the state saved.
            CheckpointError: A checkpoint could not be written.
        """
        self.restore()
        preemption, manager = self.context.preemption, self.checkpoints.manager
        with manager, progress(self.total, self.name, self.done) as bar, preemption.deferred():
            if self.needs_start():
                self.save()
            while not (preempted := preemption.requested()) and not self.finished():
                before = self.done
                try:
                    shown = self.turn()
                except TrainingPaused as paused:
                    paused.args = (f"{str(paused).removesuffix('.')}.{self.kept()}",)
                    raise
                bar.advance(self.done - before, **shown)
                manager.check()
            if preempted:
                # After a rollback the state is that of a checkpoint and the journal.
                if self.done and not self.checkpoints.holds(self.done):
                    self.save(extra=True)
                manager.finish()
                made = f"{self.name} made {self.unit} {self.done} of {self.total}"
                preemption.raise_preempted(made, saved=self.done > 0)

    def kept(self) -> str:
        """What a message says of the last checkpoint that outlives the run, if there is one."""
        self.checkpoints.manager.finish()
        steps = self.checkpoints.manager.metas()
        if not self.context.kept or not steps:
            return ""
        return f" The checkpoint of {self.unit} {max(steps)} is kept in {self.checkpoints.manager.directory}."

    def save(self, extra: bool = False) -> None:
        """Write a checkpoint of the run as it is; ``extra``: see ``RunCheckpoints.save``."""
        self.checkpoints.save(self.done, self.meta(), extra)

    def restore(self) -> None:
        """Go to the newest sound checkpoint that no rollback has abandoned, if there is one."""
        restored = self.checkpoints.load()
        if restored is not None:
            self.done, meta = restored
            self.load_meta(meta)


@dataclass(frozen=True)
class StepReport:
    """What a task reports of one step.

    These are metrics, which are averaged over a block of steps, and the tokens it trained on.
    """

    metrics: dict[str, float]
    tokens: int


class Task(Protocol):
    """A supervised objective: its gradients and its evaluation."""

    def train_step(self, step: int) -> StepReport:
        """Put the gradients of optimiser step ``step`` (from 0) into the engine."""

    def evaluate(self, model: Any) -> dict[str, float]:
        """Metrics on held-out data of the current model, as it is or sharded.

        Ranks make the same passes.
        """


class LoopConfig(Protocol):
    """Length and rhythm of a run, and its optimiser."""

    @property
    def steps(self) -> int: ...

    @property
    def eval_every(self) -> int:
        """Steps between evaluations.

        There is one before the first and one after the last step too.
        """

    @property
    def optimizer(self) -> OptimizerConfig: ...

    @property
    def checkpoint(self) -> CheckpointConfig: ...


logger = logging.getLogger(__name__)
Limited = TypeVar("Limited", bound=EpochLimit)


def within_epochs(config: Limited, batches: int, name: str) -> Limited:
    """Return the settings with the steps that ``max_epochs`` allows where an epoch has so many
    batches, and log where these are fewer.
    """
    limited = config.within_epochs(batches)
    if limited.steps < config.steps:
        logger.warning(
            "%s: %d steps in place of %d: max_epochs is %d, and an epoch has %d batches",
            name, limited.steps, config.steps, config.max_epochs, batches,
        )  # fmt: skip
    return limited


def train(
    model: Model,
    task: Callable[[Engine], Task],
    config: LoopConfig,
    name: str,
    seed: int,
    context: RunContext,
) -> tuple[Model, LoopResult]:
    """Train ``model`` in place and return it whole, without an engine.

    Of several ranks only rank 0 returns.

    Args:
        task: Makes the objective of an engine of ``model``.
        name: Sets the run's random streams apart and titles its progress.

    Raises:
        TrainingPaused, CheckpointError, Preempted: See :meth:`ResumableLoop.run`.
    """
    engine = build_engine(model, config.optimizer, config.steps, name, context)
    loop = Loop(engine, task(engine), config, name, seed, context)
    with keeping_what_was_made(context, lambda: Unfinished(model, loop.history.rows())):
        loop.run()
    result = LoopResult(loop.history.rows(), loop.tokens, loop.seconds, engine.skipped_steps)
    return on_device_if_it_fits(finish(engine, model)), result


def on_device_if_it_fits(model: Model) -> Model:
    """``model`` on this process's device, or where it is.

    Ranks may have trained one that is larger than any device.
    """
    device = distributed.device()
    elsewhere = sum(
        parameter.nbytes for parameter in model.parameters() if parameter.device.type != device.type
    )
    if elsewhere and device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        if elsewhere > ROOM * torch.cuda.mem_get_info(device)[0]:
            return model
    return model.to(device)


@dataclass(frozen=True)
class Unfinished:
    """What a training had made when an error ended it.

    Attributes:
        model: The model as it was, with its adapters if those were trained.
        history: The records until then, oldest first.
    """

    model: Any
    history: list[dict[str, Any]]


@contextmanager
def keeping_what_was_made(context: RunContext, made: Callable[[], Any]) -> Iterator[None]:
    """Give an error inside the block what training had made, as its attribute ``trained``.

    In memory nothing else would be left of hours; several processes, or a sharding engine, have
    their checkpoints.

    Args:
        context: The run's surroundings.
        made: Returns what there is, or None.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if (
            distributed.world_size() > 1
            or context.launch.engine != "local"
            or isinstance(error, Preempted)
        ):
            raise
        with suppress(Exception):  # the first error is the one to tell
            error.trained = made()  # type: ignore[union-attr]
        if not context.kept and getattr(error, "trained", None) is not None:
            _say_where_it_is(error)
        raise


def _say_where_it_is(error: BaseException) -> None:
    hint = "Without a context nothing is kept on disk; attribute trained of this exception has what was trained."
    if isinstance(error, RlhfError):
        error.args = (f"{error} {hint}",)
    else:
        error.add_note(hint)


@dataclass(frozen=True)
class LoopResult:
    """The whole history, also from before a resume, and the cost of all training steps."""

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
        records = []
        for record in self.history:
            if any(name.startswith("validation_") for name in record):
                records.append(record)
        return records


class Loop(ResumableLoop):
    """One run of supervised training.

    Checkpoints and history of an interrupted one in ``context.work`` are resumed.
    """

    unit = "step"

    def __init__(
        self,
        engine: Engine,
        task: Task,
        config: LoopConfig,
        name: str,
        seed: int,
        context: RunContext,
    ) -> None:
        self.engine, self.task, self.config, self.context = engine, task, config, context
        self.name, self.seed, self.total = name, seed, config.steps
        self.history = History(context.work / "history.jsonl")
        manager = CheckpointManager(context.work / "checkpoints", context.store)
        keep = config.checkpoint.keep
        self.checkpoints = RunCheckpoints(
            manager, {"engine": engine}, {"history": self.history}, keep
        )
        self.block = Block()
        self.done = self.tokens = 0
        self.seconds = 0.0

    def restore(self) -> None:
        """See :meth:`ResumableLoop.restore`.

        A run that begins seeds the generators and evaluates its model first.
        """
        super().restore()
        if self.done == 0:
            seed_everything(derive_seed(self.seed, self.name, "process"))
            self._record(self._evaluation())

    def turn(self) -> dict[str, float]:
        """Make one step; record, evaluate and save where its number says so."""
        started = time.perf_counter()
        self.engine.model.train()
        report = self.task.train_step(self.done)
        try:
            result = self.engine.step()
        except TrainingPaused as paused:
            self._record({"skipped_steps": self.engine.skipped_steps})
            place = f" ({self.history.path})" if self.context.kept else ""
            raise TrainingPaused(f"{paused}{place}") from paused
        # Loss and norm belong to the same weights: both were taken before the update.
        self.block.add(report.metrics | {"grad_norm": result.grad_norm})
        self.done += 1
        self.tokens += report.tokens
        self.seconds += time.perf_counter() - started
        evaluating = self.finished() or self.done % self.config.eval_every == 0
        saving = self.finished() or self.done % self.config.checkpoint.every == 0
        if evaluating or saving or self.done % RECORD_EVERY == 0:
            # A record closes its block, so that only the checkpoint of a preempted run falls inside
            # one.
            metrics = {"lr": result.lr, "skipped_steps": self.engine.skipped_steps}
            self._record(metrics | (self._evaluation() if evaluating else {}))
        if saving:
            self.save()
        return {"loss": report.metrics["loss"], "tokens_s": self.tokens / self.seconds}

    def _evaluation(self) -> dict[str, float]:
        self.engine.model.eval()
        measured = self.task.evaluate(self.engine.reader() or self.engine.model)
        return {f"validation_{name}": value for name, value in measured.items()}

    def _record(self, metrics: Mapping[str, float]) -> None:
        record: dict[str, Any] = {
            "step": self.done,
            **self.block.means(),
            **metrics,
            "tokens": self.tokens,
        }
        if self.seconds:
            record |= dict(
                zip(CLOCK_FIELDS, (self.seconds, self.tokens / self.seconds), strict=True)
            )
        self.history.append(record)
        self._track(record)

    def _track(self, record: Mapping[str, Any]) -> None:
        numbers = {
            name: value for name, value in record.items() if name != "step" and value is not None
        }
        finite = {name: float(value) for name, value in numbers.items() if math.isfinite(value)}
        self.context.tracker.log_metrics(finite, step=int(record["step"]))

    def meta(self) -> dict[str, Any]:
        """Tokens and seconds of all steps, and the metrics that no record has yet."""
        return {"tokens": self.tokens, "seconds": self.seconds, "block": self.block.state()}

    def load_meta(self, meta: Mapping[str, Any]) -> None:
        self.tokens, self.seconds = int(meta["tokens"]), float(meta["seconds"])
        self.block.load_state(meta["block"])
        # The tracked run is a new one, so that it gets the whole history.
        for record in self.history.rows():
            self._track(record)
