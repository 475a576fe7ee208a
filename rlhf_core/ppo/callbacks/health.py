"""Health monitoring during training: record findings, pause the run or roll it back to a healthy checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlhf_core.config.health.health import HealthConfig
from rlhf_core.errors import TrainingPaused
from rlhf_core.ppo.callbacks.callback import IterationRecord, TrainerCallback, TrainerContext
from rlhf_core.ppo.callbacks.health_monitor import Finding, HealthMonitor
from rlhf_core.ppo.checkpoints.rollback_journal import Rollback
from rlhf_core.ppo.checkpoints.run_checkpoint import RunCheckpoints
from rlhf_core.runtime import distributed

logger = logging.getLogger(__name__)


class HealthCallback(TrainerCallback):
    """Applies the health rules to each iteration's metrics.

    With mode ``report`` findings are only recorded. With ``enforce`` a finding whose action is ``pause`` raises
    ``TrainingPaused`` once the iteration is logged; one whose action is ``rollback`` restores the newest checkpoint
    from before the rule's window, at most ``max_rollbacks`` times, and then pauses too.
    """

    name = "health"

    def __init__(self, monitor: HealthMonitor, config: HealthConfig) -> None:
        self.monitor, self.config = monitor, config
        self.findings: list[dict[str, Any]] = []  # all of the run, those that led to rollbacks among them
        self.new_findings: list[Finding] = []  # of the newest iteration
        self.reported_rollbacks = 0

    def on_start(self, trainer: TrainerContext) -> None:
        """Save the start of the run, to which a rule that fires early goes back."""
        if self._may_roll_back(trainer.checkpoints) and not trainer.checkpoints.metas():
            trainer.save()

    def after_update(self, trainer: TrainerContext, record: IterationRecord) -> None:
        """Apply the rules, and note findings and rollbacks in the history's row."""
        journal = trainer.checkpoints.journal
        unreported = journal.entries[self.reported_rollbacks :]
        if unreported:
            record.notes["rollbacks"] = [entry.record() | {"finding": entry.finding} for entry in unreported]
        self.findings += [entry.finding for entry in unreported]
        self.reported_rollbacks = len(journal)
        self.new_findings = self.monitor.observe(record.iteration, record.metrics)
        record.notes["findings"] = [finding.as_dict() for finding in self.new_findings]
        self.findings += record.notes["findings"]

    def after_log(self, trainer: TrainerContext, record: IterationRecord) -> None:
        """Roll back or pause, if a finding of this iteration asks for it.

        Raises:
            TrainingPaused: The run must not go on, and there is nothing to go back to.
        """
        trainer.checkpoints.keep_from = self._keep_from(trainer.checkpoints, record.iteration)
        stopping = [finding for finding in self.new_findings if finding.stops and self.config.mode == "enforce"]
        if not stopping:
            return
        obstacle = ""
        if all(finding.action == "rollback" for finding in stopping):
            target, obstacle = self._rollback_target(trainer.checkpoints, stopping)
            if target is not None:
                self._roll_back(trainer, record.iteration, target, stopping[0])
                return
        if record.paused is not None:
            raise record.paused
        others = f" (and {len(stopping) - 1} more)" if len(stopping) > 1 else ""
        raise TrainingPaused(f"ppo paused: {stopping[0]}{others}{obstacle} The last checkpoint before it is kept.")

    def state(self) -> dict[str, Any]:
        """The monitor's state, all findings, and how many rollbacks the history tells of."""
        return {
            "monitor": self.monitor.state(),
            "findings": self.findings,
            "reported_rollbacks": self.reported_rollbacks,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Undo :meth:`state`."""
        self.monitor.load_state(state["monitor"])
        self.findings = list(state["findings"])
        self.reported_rollbacks = int(state["reported_rollbacks"])

    def _may_roll_back(self, checkpoints: RunCheckpoints) -> bool:
        """Whether a rule may still send the run back, so that checkpoints must be kept for it."""
        wanted = self.config.mode == "enforce" and any(rule.action == "rollback" for rule in self.monitor.rules)
        return wanted and len(checkpoints.journal) < self.config.max_rollbacks

    def _rollback_target(self, checkpoints: RunCheckpoints, findings: Sequence[Finding]) -> tuple[int | None, str]:
        """The iteration to go back to; None, and why, when the run must pause instead."""
        journal = checkpoints.journal
        if not self._may_roll_back(checkpoints):
            return None, f" {len(journal)} rollbacks were made, as many as ppo.health.max_rollbacks allows."
        steps = checkpoints.metas()
        target = last_healthy(steps, min(finding.since for finding in findings))
        if target is None and journal.entries and journal.entries[-1].to_iteration in steps:
            target = journal.entries[-1].to_iteration
        return target, "" if target is not None else " No checkpoint from before it is left to go back to."

    def _keep_from(self, checkpoints: RunCheckpoints, done: int) -> int | None:
        """The oldest checkpoint that a coming rollback may need after ``done`` iterations; None when there is none."""
        first = self.monitor.earliest_window() if self._may_roll_back(checkpoints) else None
        return None if first is None else last_healthy([*checkpoints.metas(), done], first) or 0

    def _roll_back(self, trainer: TrainerContext, iteration: int, target: int, finding: Finding) -> None:
        """Go back from ``iteration`` to the checkpoint of ``target``; what was abandoned moves into the journal."""
        rows, samples = (
            # Only the first rank's lines are whole; those of the others are discarded in the end.
            [row for row in lines.rows() if row["iteration"] > target] if distributed.is_rank_zero() else []
            for lines in (trainer.history, trainer.samples)
        )
        if distributed.is_rank_zero():
            logger.warning("ppo goes back from iteration %d to %d: %s", iteration, target, finding)
        trainer.context.tracker.log_metrics({"rollback_to": target}, step=iteration)
        trainer.checkpoints.roll_back(Rollback(iteration, target, finding.as_dict(), rows, samples))
        trainer.restore()


def last_healthy(steps: Iterable[int], first: int) -> int | None:
    """The newest of the checkpoints ``steps`` that was healthy when a rule's window began at iteration ``first``.

    The metrics of iteration k describe the policy that checkpoint k - 1 holds, so a healthy one is older than that. The
    start of the run is healthy by definition. None when no such checkpoint is left.
    """
    return max((step for step in steps if step == 0 or step + 1 < first), default=None)
