"""The monitor: applies health rules to the signals of each iteration and turns what fires into findings.

It reads what a user without a gold judge has, remembers only what the rules need, and its state is plain JSON, so that
a resumed run judges exactly like an uninterrupted one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rlhf_core.config.health.default_rules import DEFAULT_RULES
from rlhf_core.config.health.rule import Action, Check, Rule, Severity

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

    ``limits`` are the run's own limits that rules may name: ``kl`` (budget in nats per sequence) and
    ``max_new_tokens``. A rule whose metric, limit or start is unknown stays silent.
    """

    def __init__(self, limits: Mapping[str, float], rules: Sequence[Rule] = DEFAULT_RULES) -> None:
        self.limits, self.rules = dict(limits), tuple(rules)
        self.windows = _windows(self.rules)
        self.start: dict[str, list[float]] = {}
        self.recent: dict[str, list[float]] = {}
        self.seen: dict[str, list[int]] = {}  # the iterations of those
        self.best: dict[str, float] = {}
        self.active: set[str] = set()

    def observe(self, iteration: int, signals: Mapping[str, float]) -> list[Finding]:
        """Take in the signals of ``iteration`` (from 1) and return what fires now, the most severe first.

        A warning is returned when its rule begins to hold, and again only after it has ceased; a pause or rollback
        each time. Metrics that come every few iterations (``win_rate``) may be left out in between; a rule is looked at
        only when one of its metrics is new.
        """
        self._remember(iteration, signals)
        findings = []
        for rule in self.rules:
            if iteration < rule.after or not any(check.metric in signals for check in rule.checks):
                continue
            evidence = [self._evidence(check) for check in rule.checks]
            if None in evidence:
                self.active.discard(rule.name)
                continue
            if rule.action != "warn" or rule.name not in self.active:
                findings.append(_finding(rule, iteration, self._since(rule), [text for text in evidence if text]))
            self.active.add(rule.name)
        return sorted(findings, key=lambda finding: not finding.stops)

    def earliest_window(self) -> int | None:
        """The first iteration that a coming finding of a rollback rule can look back to; None without such a rule.

        A checkpoint from before it must be kept. A metric that has just been seen may stay in its window for long: a
        rule with several checks is also looked at when another of its metrics is new.
        """
        rules = [rule for rule in self.rules if rule.action == "rollback"]
        if not rules:
            return None
        newest = max((seen[-1] for seen in self.seen.values()), default=0)
        return min([newest + 1, *(self._since(rule) for rule in rules if self._known(rule))])

    def state(self) -> dict[str, Any]:
        """Everything that later judgements depend on, as JSON (non-finite values as None)."""
        return {
            "start": {name: _to_json(values) for name, values in self.start.items()},
            "recent": {name: _to_json(values) for name, values in self.recent.items()},
            "seen": {name: list(iterations) for name, iterations in self.seen.items()},
            "best": dict(self.best),
            "active": sorted(self.active),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state` of another monitor with the same rules."""
        self.start = {name: _from_json(values) for name, values in state["start"].items()}
        self.recent = {name: _from_json(values) for name, values in state["recent"].items()}
        self.seen = {name: list(iterations) for name, iterations in state["seen"].items()}
        self.best = {name: float(value) for name, value in state["best"].items()}
        self.active = set(state["active"])

    def _remember(self, iteration: int, signals: Mapping[str, float]) -> None:
        for name in self.windows.keys() & signals.keys():
            value = float(signals[name])
            self.recent[name] = [*self.recent.get(name, []), value][-self.windows[name] :]
            self.seen[name] = [*self.seen.get(name, []), iteration][-self.windows[name] :]
            if not math.isfinite(value):
                continue
            if len(self.start.setdefault(name, [])) < START_OBSERVATIONS:
                self.start[name].append(value)
            self.best[name] = max(self.best.get(name, value), value)

    def _known(self, rule: Rule) -> bool:
        """Whether any of the rule's metrics has been seen."""
        return any(check.metric in self.seen for check in rule.checks)

    def _since(self, rule: Rule) -> int:
        """The iteration of the oldest observation in the windows of ``rule``, one metric of which has been seen."""
        windows = [self.seen[check.metric][-check.window :] for check in rule.checks if check.metric in self.seen]
        return min(window[0] for window in windows)

    def _evidence(self, check: Check) -> str | None:
        """The numbers in words when ``check`` holds, None when it does not or cannot be told."""
        values = self.recent.get(check.metric, [])[-check.window :]
        if len(values) < check.window:
            return None
        if check.op == "not_finite":
            held = not any(math.isfinite(value) for value in values)
            return f"{check.metric} not finite in the last {check.window} iterations" if held else None
        value, reference = self._statistic(check, values), self._reference(check)
        if value is None or reference is None:
            return None
        limit = check.limit(reference)
        if not (value > limit if check.op == ">" else value < limit):
            return None
        what = {"mean": "", "change": "change of ", "drop": "drop from its best of "}[check.statistic]
        return f"{what}{check.metric} {value:.3g} {check.op} {limit:.3g}{_explain(check, reference)}"

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

    def _reference(self, check: Check) -> float | None:
        kind, _, name = check.of.partition(":")
        if kind == "value":
            return 1.0
        return self.limits.get(name) if kind == "limit" else self._start(name or check.metric)

    def _start(self, metric: str) -> float | None:
        """Mean of the first values; None until there are enough, so that nothing is compared with noise."""
        values = self.start.get(metric, [])
        return sum(values) / len(values) if len(values) == START_OBSERVATIONS else None


def _windows(rules: Iterable[Rule]) -> dict[str, int]:
    """How many recent values each metric needs; metrics read only as a start need one."""
    needed: dict[str, int] = {}
    for check in (check for rule in rules for check in rule.checks):
        needed[check.metric] = max(needed.get(check.metric, 1), check.window)
        kind, _, name = check.of.partition(":")
        if kind == "start" and name:
            needed.setdefault(name, 1)
    return needed


def _explain(check: Check, reference: float) -> str:
    kind, _, name = check.of.partition(":")
    if kind == "value":
        return f" (window {check.window})"
    source = f"limit {name}" if kind == "limit" else f"{name or check.metric} at the start"
    return f" ({source} {reference:.3g}, window {check.window})"


def _finding(rule: Rule, iteration: int, since: int, evidence: Sequence[str]) -> Finding:
    return Finding(
        rule=rule.name,
        iteration=iteration,
        since=since,
        severity=rule.severity,
        action=rule.action,
        symptom=rule.symptom,
        cause=rule.cause,
        evidence=tuple(evidence),
        remedy=rule.remedy,
        adjust=rule.adjust if rule.action == "rollback" else (),
    )


def _to_json(values: Sequence[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]


def _from_json(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else float(value) for value in values]
