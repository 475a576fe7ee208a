"""The PPO loop: roll out, look, update, select, record (algorithms.md §4 to 8). Thin on purpose."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core import distributed
from rlhf_core.data.batching import batch_at
from rlhf_core.errors import TrainingPaused
from rlhf_core.ppo.advantages import explained_variance
from rlhf_core.ppo.experience import Experience
from rlhf_core.ppo.health_monitor import Finding, Monitor
from rlhf_core.ppo.health_signals import signals
from rlhf_core.ppo.kl import KlController, kl_pull
from rlhf_core.ppo.reward_sources.mixture import source_figures
from rlhf_core.ppo.rewards import RunningMeanStd
from rlhf_core.ppo.rollback import Journal, Rollback, Rollbacks
from rlhf_core.ppo.rollout import Actors, Scorer, collect, sequence_figures
from rlhf_core.ppo.run_checkpoint import Lines, RunFiles, prune_best, save_best
from rlhf_core.ppo.update import Learner, first_ratio, update
from rlhf_core.progress import Progress, progress
from rlhf_core.training.engine.base import MAX_NONFINITE_IN_A_ROW
from rlhf_core.training.engine.frozen import FrozenModels
from rlhf_core.training.rng import derive_seed
from rlhf_core.training.run_context import RunContext

logger = logging.getLogger(__name__)

SAMPLES = 8
# Of the selection's figures these are signals of their own; the others would collide with those of the rollout.
SELECTION_SIGNALS = ("win_rate", "win_rate_low95", "win_rate_high95", "referee_gap")


@dataclass(frozen=True)
class Verdict:
    """What the selector says of one checkpoint: its figures, and whether it is the one to keep so far."""

    figures: dict[str, float]
    keep: bool


class Selector(Protocol):
    """Judges checkpoints on fixed prompts. The trainer knows neither judges nor limits."""

    def consider(self, iteration: int, policy: PreTrainedModel) -> Verdict:
        """Evaluate the policy after ``iteration`` (from 1)."""

    def state(self) -> dict[str, Any]:
        """What later verdicts depend on, as JSON."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state`."""


@dataclass(frozen=True)
class Prompts:
    """Training prompts as tokens and text, and how replies become text."""

    ids: Sequence[Sequence[int]]
    texts: Sequence[str]
    decode: Callable[[list[int]], str]


@dataclass
class Trainer:
    """Everything of one run. ``moments`` come from critic pre-training and go on being updated here."""

    learner: Learner
    actors: Actors
    prompts: Prompts
    moments: RunningMeanStd
    monitor: Monitor
    selector: Selector
    context: RunContext
    referee: Scorer | None = None
    frozen: FrozenModels = field(default_factory=FrozenModels)
    findings: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = self.learner.config
        self.config = config
        self.controller = KlController(config.kl)
        self.history, self.samples = (
            Lines(self.context.work / "history.jsonl"),
            Lines(self.context.work / "samples.jsonl"),
        )
        lines = {"history": self.history, "samples": self.samples}
        self.files = RunFiles(
            self.context.work / "checkpoints", self.learner.engines, lines, config.checkpoint.keep, self.context.store
        )
        self.journal = Journal(self.context.work / "rollbacks.json")
        self.rollbacks = Rollbacks(config.health, self.monitor, self.files, self.journal)
        self.done, self.best = 0, 0
        self.unreported: list[dict[str, Any]] = []  # rollbacks that no row of the history tells of yet

    def run(self) -> None:
        """Train to the configured number of iterations, resuming where an earlier process stopped.

        ``TrainingPaused`` when a health rule stops the run (mode ``enforce``) or steps keep being non-finite; the
        last checkpoint before that is kept, so the same run pauses again at the same place. ``Preempted`` after the
        iteration in which SIGTERM came, with the state saved.
        """
        self._resume()
        if self.rollbacks.armed and not self.files.metas():
            self._save()  # the start, to which a rule that fires early goes back
        total = self.config.iterations
        preemption = self.context.preemption
        with progress(total, "ppo") as shown, preemption.deferred():
            if self.done:
                shown.advance(self.done)
            while not (stopping := preemption.requested()) and self.done < total:
                self._iterate(shown)
            if stopping:
                self._leave()

    def _leave(self) -> None:
        # After a rollback the state is that of a checkpoint and the journal.
        if self.done and not self.files.holds(self.done):
            self._save(extra=True)
        self.context.preemption.raise_preempted(
            f"ppo made iteration {self.done} of {self.config.iterations}", saved=self.done > 0
        )

    def _iterate(self, shown: Progress) -> None:
        iteration = self.done
        seconds: dict[str, float] = {}
        rows, experience = self._collect(iteration, seconds)
        coefficient = self.controller.value
        started = time.perf_counter()
        figures, stopped = self._update(experience, coefficient, iteration)
        seconds["seconds_update"] = time.perf_counter() - started
        texts = [self.prompts.decode(ids) for ids in _replies(experience)]
        with self.frozen.on_device():
            row = self._signals(experience, texts, figures) | {
                "kl_coefficient": coefficient,
                "kl_pull": kl_pull(experience.shaped_scores, coefficient),
                "ptx_weight": self.config.ptx.weight,
            }
        # One view for all ranks, however their last digits may differ: every decision below follows from it.
        row = distributed.broadcast_from_rank0(row)
        self.controller.update(row["kl"], len(experience))
        self.done += 1
        if self._due(self.config.selection.every) and stopped is None:
            started = time.perf_counter()
            row |= self._select()
            seconds["seconds_selection"] = time.perf_counter() - started
            self._sample(rows, texts, experience.scores)
        findings = self.monitor.observe(self.done, row)
        self._record(row, seconds, findings)
        if not self._rolled_back(findings, stopped) and self._due(self.config.checkpoint.every):
            self._save()
        shown.advance(self.done - iteration, reward=row["reward_mean"], kl=row["kl"], length=row["length"])

    def _update(
        self, experience: Experience, coefficient: float, iteration: int
    ) -> tuple[dict[str, float], TrainingPaused | None]:
        """The figures of the update, and what stopped it when steps kept being non-finite: health rules come first."""
        try:
            return update(self.learner, experience, coefficient, iteration), None
        except TrainingPaused as stopped:
            skipped = float(MAX_NONFINITE_IN_A_ROW)
            return {"nonfinite_in_a_row": skipped, "skipped_steps": skipped}, stopped

    def _due(self, every: int) -> bool:
        return self.done % every == 0 or self.done == self.config.iterations

    def _collect(self, iteration: int, seconds: dict[str, float]) -> tuple[list[int], Experience]:
        config, size = self.config, self.config.batch_size
        rows = batch_at(len(self.prompts.ids), size, derive_seed(config.seed, "ppo", "prompts"), iteration)
        with self.frozen.on_device(), self.learner.gathered_parameters():
            experience = collect(
                self.actors,
                [self.prompts.ids[row] for row in rows],
                range(iteration * size, (iteration + 1) * size),
                # After a rollback other replies are drawn, so that one unlucky draw does not fail the run twice.
                derive_seed(config.seed, "ppo", "rollout", *([len(self.journal)] if len(self.journal) else [])),
                self.learner.sampling,
                config.units,
                self.moments,
                self.controller.value,
                config.surrogate.fixed_reference,
                seconds,
            )
        return rows, experience

    def _signals(self, experience: Experience, texts: list[str], figures: dict[str, float]) -> dict[str, float]:
        mask = experience.response_mask
        found = signals(
            scores=experience.scores,
            response_mask=mask,
            logprobs=experience.policy_logprobs,
            ref_logprobs=experience.ref_logprobs,
            replies=texts,
            finished=experience.finished,
            entropies=experience.entropy,
            referee_scores=self.referee(experience.batch) if self.referee is not None else None,
            update=figures,
        )
        return found | sequence_figures(experience) | source_figures(self.actors.score) | {
            "explained_variance": explained_variance(experience.values, experience.monte_carlo, mask),
            "first_ratio": first_ratio(experience),
            "moments_mean": self.moments.mean,
            "moments_std": self.moments.std,
        }  # fmt: skip

    def _select(self) -> dict[str, float]:
        with self.frozen.on_device(), self.learner.policy_engine.gathered_parameters():
            verdict = self.selector.consider(self.done, self.learner.policy)
        if verdict.keep:
            save_best(self.context.work / "best", self.done, self.learner.policy_weights())
            self.best = self.done
            prune_best(self.context.work / "best", {self.best} | self.rollbacks.needed_best())
        return {
            name if name in SELECTION_SIGNALS else f"selection_{name}": value for name, value in verdict.figures.items()
        }

    def _record(self, row: dict[str, float], seconds: dict[str, float], findings: list[Finding]) -> None:
        self.context.tracker.log_metrics(row | seconds, step=self.done)
        listed = [finding.as_dict() for finding in findings]
        self.findings += listed
        told = {"rollbacks": self.unreported} if self.unreported else {}
        self.history.append({"iteration": self.done} | row | seconds | {"findings": listed} | told)
        self.unreported = []

    def _sample(self, rows: list[int], texts: list[str], scores: Tensor) -> None:
        for row, text, score in list(zip(rows, texts, scores.tolist(), strict=True))[:SAMPLES]:
            self.samples.append(
                {"iteration": self.done, "prompt": self.prompts.texts[row], "reply": text, "score": score}
            )

    def _rolled_back(self, findings: list[Finding], stopped: TrainingPaused | None) -> bool:
        """Whether the run went back to a healthy checkpoint. ``TrainingPaused`` when it must neither go on nor back."""
        stopping = [finding for finding in findings if finding.stops] if self.config.health.mode == "enforce" else []
        obstacle = ""
        if stopping and all(finding.action == "rollback" for finding in stopping):
            target, obstacle = self.rollbacks.target(stopping)
            if target is not None:
                self._roll_back(stopping[0], target)
                return True
        if stopped is not None:
            raise stopped
        if stopping:
            others = f" (and {len(stopping) - 1} more)" if len(stopping) > 1 else ""
            raise TrainingPaused(f"ppo paused: {stopping[0]}{others}{obstacle} The last checkpoint before it is kept.")
        return False

    def _roll_back(self, finding: Finding, target: int) -> None:
        """Go back to the checkpoint of iteration ``target``; what was abandoned moves into the journal."""
        rows, samples = (
            # Only the first rank's lines are whole; those of the others are thrown away in the end.
            [row for row in lines.rows() if row["iteration"] > target] if distributed.is_rank_zero() else []
            for lines in (self.history, self.samples)
        )
        if distributed.is_rank_zero():
            logger.warning("ppo goes back from iteration %d to %d: %s", self.done, target, finding)
        self.context.tracker.log_metrics({"rollback_to": target}, step=self.done)
        self.journal.add(Rollback(self.done, target, finding.as_dict(), rows, samples))
        self._resume()

    def _save(self, extra: bool = False) -> None:
        meta = {
            "moments": self.moments.to_dict(),
            "coefficient": self.controller.value,
            "monitor": self.monitor.state(),
            "selector": self.selector.state(),
            "findings": self.findings,
            "best": self.best,
            "rollbacks": len(self.journal),
        }
        self.files.save(self.done, meta, self.rollbacks.keep_from(self.done), extra)
        if not extra:
            prune_best(self.context.work / "best", {self.best} | self.rollbacks.needed_best())

    def _resume(self) -> None:
        """Restore the newest checkpoint that no rollback abandoned, adjusted by the rollbacks that it has not seen."""
        self.rollbacks.drop_abandoned()
        found = self.files.load()
        if found is None:
            self.journal.clear()
            return
        self.done, meta = found
        for name, value in RunningMeanStd.from_dict(meta["moments"]).to_dict().items():
            setattr(self.moments, name, value)
        self.monitor.load_state(meta["monitor"])
        self.selector.load_state(meta["selector"])
        self.best = int(meta["best"])
        new = self.journal.entries[meta["rollbacks"] :]
        self.findings = [*meta["findings"], *(entry.finding for entry in new)]
        self.unreported = [entry.record() | {"finding": entry.finding} for entry in new]
        self.controller.value = float(meta["coefficient"]) * self.journal.factor("kl_coefficient", meta["rollbacks"])
        for engine in self.files.engines.values():
            engine.lr_factor = self.journal.factor("lr")


def _replies(experience: Experience) -> list[list[int]]:
    """Token ids of each reply, its end marker included."""
    return [row[:length] for row, length in zip(experience.batch.response.tolist(), experience.lengths.tolist(),
                                                strict=True)]  # fmt: skip
