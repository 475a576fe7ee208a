"""Health monitoring during training.

Rules look at the signals of each iteration; findings lead to warnings, pauses and rollbacks.

The monitor reads what a user without a gold judge has, remembers only what the rules need, and its
state is plain JSON, so that a resumed run judges exactly like an uninterrupted one.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rlhf_core.config.health import (
    DEFAULT_RULES,
    DRIFT,
    Action,
    Check,
    HealthConfig,
    Rule,
    Severity,
)
from rlhf_core.errors import TrainingPaused
from rlhf_core.ppo.checkpoints import Rollback, RollbackCheckpoints, RollbackJournal
from rlhf_core.ppo.experience import IterationRecord
from rlhf_core.runtime import distributed
from rlhf_core.training.history import none_as_nan, nonfinite_as_none

logger = logging.getLogger(__name__)

OF_STATISTIC = {"mean": "", "change": "change of ", "drop": "drop from its best of "}
START_OBSERVATIONS = 3  # the start of a run is the mean of this many first values


@dataclass(frozen=True)
class Finding:
    """One rule that fired: what was seen, the likely cause, the numbers, and what to do.

    ``since`` is the iteration of the oldest observation that the rule looked at.
    """

    rule: str
    iteration: int
    since: int
    severity: Severity
    action: Action
    symptom: str
    cause: str
    evidence: tuple[str, ...]
    remedy: str
    adjust: tuple[tuple[str, float], ...] = ()

    @property
    def stops(self) -> bool:
        """Whether training must not simply go on."""
        return self.action != "warn"

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON, for the history, the metrics and the report."""
        return asdict(self) | {"evidence": list(self.evidence), "adjust": dict(self.adjust)}

    def __str__(self) -> str:
        return (
            f"[{self.action}] {self.rule} at iteration {self.iteration}: {self.symptom} ({'; '.join(self.evidence)}). "
            f"Likely cause: {self.cause}. Remedy: {self.remedy}."
        )


class HealthMonitor:
    """Applies ``rules`` to the signals of each iteration.

    ``limits`` are the run's own limits that rules may name: ``kl`` (budget in nats per sequence)
    and ``max_new_tokens``. A rule whose metric, limit or start is unknown stays silent.
    """

    def __init__(self, limits: Mapping[str, float], rules: Sequence[Rule] = DEFAULT_RULES) -> None:
        self.limits = dict(limits)
        self.rules = tuple(rules)
        self.windows = _windows(self.rules)
        self.start: dict[str, list[float]] = {}
        self.recent: dict[str, list[float]] = {}
        self.seen: dict[str, list[int]] = {}  # the iterations of those
        self.best: dict[str, float] = {}
        self.active: set[str] = set()

    def observe(self, iteration: int, signals: Mapping[str, float]) -> list[Finding]:
        """Take in an iteration's signals, and return what fires now, the most severe first.

        Iterations count from 1.

        A warning is returned when its rule begins to hold, and again only after it has ceased; a
        pause or rollback each time. Metrics that come every few iterations (``win_rate``) may be
        left out in between; a rule is looked at only when one of its metrics is new.
        """
        self._remember(iteration, signals)
        findings = []
        for rule in self.rules:
            is_new = any(check.metric in signals for check in rule.checks)
            if iteration < rule.after or not is_new:
                continue
            evidence: list[str] = []
            for check in rule.checks:
                text = self._evidence(check)
                if text is not None:
                    evidence.append(text)
            if len(evidence) < len(rule.checks):
                self.active.discard(rule.name)
                continue
            if rule.action != "warn" or rule.name not in self.active:
                finding = Finding(
                    rule=rule.name,
                    iteration=iteration,
                    since=self._since(rule),
                    severity=rule.severity,
                    action=rule.action,
                    symptom=rule.symptom,
                    cause=rule.cause,
                    evidence=tuple(evidence),
                    remedy=rule.remedy,
                )
                if rule.action == "rollback":
                    finding = replace(finding, adjust=rule.adjust)
                findings.append(finding)
            self.active.add(rule.name)
        # Drift is the effect; a rule that looks at replies or rewards is nearer to its cause.
        return sorted(findings, key=lambda finding: (not finding.stops, finding.cause == DRIFT))

    def earliest_window(self) -> int | None:
        """The first iteration that a coming finding of a rollback rule can look back to.

        None without such a rule.

        A checkpoint from before it must be kept. A metric that has just been seen may stay in its
        window for long: a rule with several checks is also looked at when another of its metrics is
        new.
        """
        rules = [rule for rule in self.rules if rule.action == "rollback"]
        if not rules:
            return None
        newest = max((seen[-1] for seen in self.seen.values()), default=0)
        earliest = newest + 1
        for rule in rules:
            if any(check.metric in self.seen for check in rule.checks):
                earliest = min(earliest, self._since(rule))
        return earliest

    def state(self) -> dict[str, Any]:
        """Everything that later judgements depend on, as JSON (non-finite values as None)."""
        seen = {name: getattr(self, name) for name in ("start", "recent", "seen", "best")}
        return {**nonfinite_as_none(seen), "active": sorted(self.active)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state` of another monitor with the same rules."""

        def numbers(of: str) -> dict[str, list[float]]:
            return {name: list(map(none_as_nan, values)) for name, values in state[of].items()}

        self.start = numbers("start")
        self.recent = numbers("recent")
        self.seen = {name: list(iterations) for name, iterations in state["seen"].items()}
        self.best = {name: float(value) for name, value in state["best"].items()}
        self.active = set(state["active"])

    def _remember(self, iteration: int, signals: Mapping[str, float]) -> None:
        for name in self.windows.keys() & signals.keys():
            value = float(signals[name])
            window = self.windows[name]
            recent = [*self.recent.get(name, []), value]
            self.recent[name] = recent[-window:]
            seen = [*self.seen.get(name, []), iteration]
            self.seen[name] = seen[-window:]
            if not math.isfinite(value):
                continue
            if len(self.start.setdefault(name, [])) < START_OBSERVATIONS:
                self.start[name].append(value)
            self.best[name] = max(self.best.get(name, value), value)

    def _since(self, rule: Rule) -> int:
        """The iteration of the oldest observation in the windows of ``rule``.

        One of its metrics has been seen.
        """
        oldest = []
        for check in rule.checks:
            window = self.seen.get(check.metric, [])[-check.window :]
            oldest += window[:1]
        return min(oldest)

    def _evidence(self, check: Check) -> str | None:
        """The numbers in words when ``check`` holds, None when it does not or cannot be told."""
        values = self.recent.get(check.metric, [])[-check.window :]
        if len(values) < check.window:
            return None
        if check.op == "not_finite":
            if any(math.isfinite(value) for value in values):
                return None
            return f"{check.metric} not finite in the last {check.window} iterations"
        value = self._statistic(check, values)
        reference, origin = self._reference(check)
        if value is None or reference is None:
            return None
        limit = check.limit(reference)
        exceeds = operator.gt if check.op == ">" else operator.lt
        if not exceeds(value, limit):
            return None
        measured = f"{OF_STATISTIC[check.statistic]}{check.metric}"
        source = f"window {check.window}"
        if origin:
            source = f"{origin} {reference:z.3g}, {source}"
        return f"{measured} {value:z.3g} {check.op} {limit:.3g} ({source})"

    def _statistic(self, check: Check, values: Sequence[float]) -> float | None:
        mean = sum(values) / len(values)
        if not math.isfinite(mean):
            return None
        if check.statistic == "mean":
            return mean
        if check.statistic == "drop":
            return self.best[check.metric] - mean
        start = self._start(check.metric)
        return None if start is None else mean - start

    def _reference(self, check: Check) -> tuple[float | None, str]:
        """The number that the limit of ``check`` is a multiple of, and where it comes from."""
        kind, _, name = check.of.partition(":")
        if kind == "value":
            return 1.0, ""
        if kind == "limit":
            return self.limits.get(name), f"limit {name}"
        metric = name or check.metric
        return self._start(metric), f"{metric} at the start"

    def _start(self, metric: str) -> float | None:
        """Mean of the first values; None until there are enough to compare with."""
        values = self.start.get(metric, [])
        if len(values) == START_OBSERVATIONS:
            return sum(values) / len(values)
        return None


def _windows(rules: Iterable[Rule]) -> dict[str, int]:
    """How many recent values each metric needs; metrics read only as a start need one."""
    needed: dict[str, int] = {}
    for rule in rules:
        for check in rule.checks:
            needed[check.metric] = max(needed.get(check.metric, 1), check.window)
            kind, _, name = check.of.partition(":")
            if kind == "start" and name:
                needed.setdefault(name, 1)
    return needed


class HealthGuard:
    """Watches a run by the health rules, and pauses it or rolls it back to a healthy checkpoint.

    With mode ``report`` findings are only recorded. With ``enforce`` a finding whose action is
    ``pause`` raises ``TrainingPaused`` once the iteration is logged; one whose action is
    ``rollback`` restores the newest checkpoint from before the rule's window, at most
    ``max_rollbacks`` times, and then pauses too.
    """

    def __init__(self, monitor: HealthMonitor, config: HealthConfig) -> None:
        self.monitor = monitor
        self.config = config
        # All of the run, those that led to rollbacks among them.
        self.findings: list[dict[str, Any]] = []
        self.new_findings: list[Finding] = []  # of the newest iteration
        self.reported_rollbacks = 0

    def needs_start(self, checkpoints: RollbackCheckpoints) -> bool:
        """Whether to save the start of the run, to which an early rule would go back."""
        return self._may_roll_back(checkpoints) and not checkpoints.metas()

    def observe(self, record: IterationRecord, journal: RollbackJournal) -> None:
        """Apply the rules, and note findings and rollbacks in the history's row."""
        unreported = journal.entries[self.reported_rollbacks :]
        rollbacks = [entry.record() | {"finding": entry.finding} for entry in unreported]
        if rollbacks:
            record.notes["rollbacks"] = rollbacks
        self.findings += [entry.finding for entry in unreported]
        self.reported_rollbacks = len(journal)
        self.new_findings = self.monitor.observe(record.iteration, record.metrics)
        record.notes["findings"] = [finding.as_dict() for finding in self.new_findings]
        self.findings += record.notes["findings"]

    def rollback(
        self, record: IterationRecord, checkpoints: RollbackCheckpoints
    ) -> Rollback | None:
        """Return the rollback that a finding asks for, if one does, or pause the run.

        Raises:
            TrainingPaused: The run must not go on, and there is nothing to go back to.
        """
        checkpoints.keep_from = None  # the oldest that a coming rollback may need
        first = self.monitor.earliest_window()
        if first is not None and self._may_roll_back(checkpoints):
            steps = [*checkpoints.metas(), record.iteration]
            checkpoints.keep_from = last_healthy(steps, first) or 0
        stopping = [finding for finding in self.new_findings if finding.stops]
        if not stopping or self.config.mode != "enforce":
            return None
        obstacle = ""
        if all(finding.action == "rollback" for finding in stopping):
            target, obstacle = self._rollback_target(checkpoints, stopping)
            if target is not None:
                return self._back_to(target, record.iteration, stopping[0], checkpoints)
        if record.paused is not None:
            raise record.paused
        fired = " ".join(str(finding) for finding in stopping)
        of_several = f" by {len(stopping)} rules" if len(stopping) > 1 else ""
        raise TrainingPaused(f"ppo paused{of_several}: {fired}{obstacle}")

    def state(self) -> dict[str, Any]:
        """The monitor's state, all findings, and how many rollbacks the history tells of."""
        return {
            "monitor": self.monitor.state(),
            "findings": self.findings,
            "reported_rollbacks": self.reported_rollbacks,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.monitor.load_state(state["monitor"])
        self.findings = list(state["findings"])
        self.reported_rollbacks = int(state["reported_rollbacks"])

    def _may_roll_back(self, checkpoints: RollbackCheckpoints) -> bool:
        """Whether a rule may still send the run back, so that checkpoints must be kept for it."""
        if self.config.mode != "enforce":
            return False
        wanted = any(rule.action == "rollback" for rule in self.monitor.rules)
        return wanted and len(checkpoints.journal) < self.config.max_rollbacks

    def _rollback_target(
        self, checkpoints: RollbackCheckpoints, findings: Sequence[Finding]
    ) -> tuple[int | None, str]:
        """The iteration to go back to; None, and why, when the run must pause instead."""
        journal = checkpoints.journal
        if not self._may_roll_back(checkpoints):
            made = f" {len(journal)} rollbacks were made"
            return None, f"{made}, as many as ppo.health.max_rollbacks allows."
        steps = checkpoints.metas()
        first = min(finding.since for finding in findings)
        target = last_healthy(steps, first)
        if target is not None:
            return target, ""
        for entry in journal.entries[-1:]:
            if entry.to_iteration in steps:
                return entry.to_iteration, ""
        return None, " No checkpoint from before it is left to go back to."

    def _back_to(
        self, target: int, iteration: int, finding: Finding, checkpoints: RollbackCheckpoints
    ) -> Rollback:
        """The way back from ``iteration`` to the checkpoint of ``target``.

        It holds what is abandoned.
        """
        abandoned: dict[str, list[dict[str, Any]]] = {"history": [], "samples": []}
        # Only the first rank's lines are whole; those of the others are discarded in the end.
        if distributed.is_rank_zero():
            logger.warning("ppo goes back from iteration %d to %d: %s", iteration, target, finding)
            for kind, rows in abandoned.items():
                written = checkpoints.lines[kind].rows()
                rows.extend(row for row in written if row["iteration"] > target)
        return Rollback(
            iteration, target, finding.as_dict(), abandoned["history"], abandoned["samples"]
        )


def last_healthy(steps: Iterable[int], first: int) -> int | None:
    """The newest checkpoint that was healthy when a rule's window began.

    ``steps`` are the checkpoints, and the window begins at iteration ``first``.

    The metrics of iteration k describe the policy that checkpoint k - 1 holds, so a healthy one is
    older than that. The start of the run is healthy by definition. None when no such checkpoint is
    left.
    """
    return max((step for step in steps if step == 0 or step + 1 < first), default=None)
