"""Gates: metrics and conditions in, a decision with its evidence out.

A gate never trusts what it cannot read: a metric that is missing, not a number, infinite or NaN fails its condition.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlhf_core.config.gates import ABSENT, LOSSES, Condition
from rlhf_core.errors import GateFailed
from rlhf_core.storage.files import atomic_write_json, atomic_write_text, read_json, sha256_file

PASS_TEXT = "passed\n"


@dataclass(frozen=True)
class ConditionResult:
    """One condition with what was found. ``value`` and ``limit`` are None where they are missing or not finite."""

    metric: str
    value: float | None
    bound: str
    limit: float | None
    passed: bool
    why: str
    note: str = ""


@dataclass(frozen=True)
class GateDecision:
    """``passed`` is the truth about the conditions; ``mode`` says whether it stops the pipeline (``enforce``) or is
    only recorded (``report``). ``evidence`` maps each metric file to the sha256 of what was read."""

    name: str
    passed: bool
    mode: str
    conditions: tuple[ConditionResult, ...]
    evidence: Mapping[str, str] = field(default_factory=dict)

    @property
    def opens(self) -> bool:
        """True when later stages may run: the conditions hold, or the gate only reports."""
        return self.passed or self.mode == "report"

    def as_dict(self) -> dict[str, Any]:
        """The content of ``gates/NAME.json``."""
        conditions = [asdict(c) for c in self.conditions]
        return {
            "gate": self.name,
            "passed": self.passed,
            "mode": self.mode,
            "conditions": conditions,
            "evidence": dict(self.evidence),
        }

    def save(self, path: Path) -> None:
        """Write ``gates/NAME.json`` atomically."""
        atomic_write_json(path, self.as_dict())

    def failure(self) -> str:
        """Describe in one line which conditions do not hold."""
        if not self.conditions:
            return f"the {self.name} gate failed: it has no conditions"
        failed = [c for c in self.conditions if not c.passed]
        reasons = [f"{c.metric} is {c.note or _number(c.value or 0.0)}, bound {c.bound}" for c in failed]
        return f"the {self.name} gate failed: {'; '.join(reasons)}"


def decide(
    name: str,
    conditions: Sequence[Condition],
    metrics: Mapping[str, Any],
    *,
    mode: str = "enforce",
    evidence: Mapping[str, str] | None = None,
) -> GateDecision:
    """Check every condition against nested ``metrics``. A gate without conditions vouches for nothing: it fails."""
    results = tuple(check(condition, metrics) for condition in conditions)
    passed = bool(results) and all(result.passed for result in results)
    return GateDecision(name, passed, mode, results, dict(evidence or {}))


def check(condition: Condition, metrics: Mapping[str, Any]) -> ConditionResult:
    """One condition against nested ``metrics``; see :class:`Condition` for the kinds of bound."""
    if condition.worse_by_less_than is not None:
        return _check_loss(condition, condition.worse_by_less_than, metrics)
    value, note = lookup(metrics, condition.metric)
    limit, bound = _limit(condition, metrics)
    if value is None or limit is None:
        note = note or f"{condition.at_most_of or condition.at_least_of} is missing or not finite"
        return ConditionResult(condition.metric, value, bound, limit, False, condition.why, note)
    from_below = condition.at_least is not None or condition.at_least_of is not None
    passed = value >= limit if from_below else value <= limit
    note = "" if passed else _undecided(condition.metric, metrics)
    return ConditionResult(condition.metric, value, bound, limit, passed, condition.why, note)


def _undecided(metric: str, metrics: Mapping[str, Any]) -> str:
    """Why a win rate at equal lengths is not decided; empty for every other metric, and where it is."""
    rate, _, bound = metric.rpartition("_")
    if not rate.endswith("lc_win_rate") or bound != "low95":
        return ""
    low, high, share = (
        lookup(metrics, name)[0] for name in (metric, f"{rate}_high95", f"{rate.removesuffix('lc_win_rate')}lc_share")
    )
    if (low, high) != (0.0, 1.0) or share is None:
        return ""
    return f"undecided: only {share:.0%} of the pairs have a counterpart whose length differs the other way"


def _check_loss(condition: Condition, margin: float, metrics: Mapping[str, Any]) -> ConditionResult:
    """Whether the policy is worse than SFT by less than the margin, or SFT has too little to lose."""
    loss = f"{LOSSES}.{condition.metric}"
    high, missing = lookup(metrics, f"{loss}.loss_high95")
    before, unknown = lookup(metrics, f"{loss}.baseline")
    bound = describe_bound(condition)
    if condition.where_at_least is not None:
        if before is None:
            return ConditionResult(condition.metric, None, bound, margin, False, condition.why, unknown)
        if before < condition.where_at_least:
            note = f"not asked: SFT's is {_number(before)}, below {_number(condition.where_at_least)}"
            return ConditionResult(condition.metric, high, bound, margin, True, condition.why, note)
    passed = high is not None and high < margin
    return ConditionResult(condition.metric, high, bound, margin, passed, condition.why, missing)


def _limit(condition: Condition, metrics: Mapping[str, Any]) -> tuple[float | None, str]:
    """The bound as a number and in words."""
    if condition.at_least is not None:
        return condition.at_least, f">= {_number(condition.at_least)}"
    if condition.at_most is not None:
        return condition.at_most, f"<= {_number(condition.at_most)}"
    if condition.worse_by_less_than is not None:
        return condition.worse_by_less_than, f"worse by < {_number(condition.worse_by_less_than)}"
    factor, slack = _number(condition.factor), _number(condition.slack)
    if condition.at_least_of is not None:
        other = condition.at_least_of
        base, _ = lookup(metrics, other)
        text = f">= min({factor} * {other}, {other} - {slack})"
        return (None if base is None else min(condition.factor * base, base - condition.slack)), text
    other = str(condition.at_most_of)
    base, _ = lookup(metrics, other)
    text = f"<= max({factor} * {other}, {other} + {slack})"
    return (None if base is None else max(condition.factor * base, base + condition.slack)), text


def lookup(metrics: Mapping[str, Any], path: str) -> tuple[float | None, str]:
    """The finite number at a dotted path, or None and the reason. Keys that contain dots themselves are found too.

    Where metrics say themselves why one of them is absent, that is the reason.
    """
    value = _find(metrics, path.split("."))
    if value is None:
        return None, _absence(metrics, path)
    if isinstance(value, bool):
        return float(value), ""
    if not isinstance(value, int | float):
        return None, "not a number"
    return (float(value), "") if math.isfinite(value) else (None, "not finite")


def _absence(metrics: Mapping[str, Any], path: str) -> str:
    """Why there is no metric at a path: what stands beside it under ``absent``, for its name or for what begins it."""
    group, _, name = path.rpartition(".")
    reasons = _find(metrics, [*group.split("."), ABSENT])
    if isinstance(reasons, Mapping):
        for of, reason in reasons.items():
            if name == of or name.startswith(f"{of}_"):
                return f"missing: {reason}"
    return "missing"


def _find(node: Any, parts: list[str]) -> Any:
    """The longest key wins at each level, so that ``{"a.b": 1}`` and ``{"a": {"b": 1}}`` both answer to ``a.b``."""
    if not parts:
        return node
    if not isinstance(node, Mapping):
        return None
    for end in range(len(parts), 0, -1):
        key = ".".join(parts[:end])
        if key in node:
            value = _find(node[key], parts[end:])
            if value is not None:
                return value
    return None


def weaker_conditions(conditions: Sequence[Condition], required: Sequence[Condition]) -> list[str]:
    """Return those of ``required`` that ``conditions`` do not guarantee, each as ``metric bound``.

    If nothing is returned, metrics that pass ``conditions`` pass ``required``. A relative bound is guaranteed only by
    one with the same factor: which of two factors is stricter depends on the sign of the metric, which is not known.
    """
    return [
        f"{condition.metric} {describe_bound(condition)}"
        for condition in required
        if not any(_guarantees(own, condition) for own in conditions)
    ]


def _guarantees(own: Condition, required: Condition) -> bool:
    """Whether every metric that passes ``own`` passes ``required``."""
    if own.metric != required.metric:
        return False
    if own.at_least is not None and required.at_least is not None:
        return own.at_least >= required.at_least
    if own.at_most is not None and required.at_most is not None:
        return own.at_most <= required.at_most
    if own.worse_by_less_than is not None and required.worse_by_less_than is not None:
        asked = own.where_at_least is None or (
            required.where_at_least is not None and own.where_at_least <= required.where_at_least
        )
        return asked and own.worse_by_less_than <= required.worse_by_less_than
    same_reference = (own.at_most_of, own.at_least_of) == (required.at_most_of, required.at_least_of)
    relative = required.at_most_of is not None or required.at_least_of is not None
    return relative and same_reference and own.factor == required.factor and own.slack <= required.slack


def describe_bound(condition: Condition) -> str:
    """Return the bound of a condition in words, such as ``>= 0.65``."""
    return _limit(condition, {})[1]


def load_metrics(primary: Path, **others: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Metrics of several files and their hashes. The primary file's names stay as they are; the others' get their
    keyword as a prefix, so ``load_metrics(evaluation, ppo=path)`` answers to ``kl`` and ``ppo.kl``.

    Raises :class:`DataError` for a file that is missing or not JSON."""
    metrics = dict(read_json(primary))
    evidence = {_evidence_name(primary): sha256_file(primary)}
    for prefix, path in others.items():
        metrics[prefix] = read_json(path)
        evidence[_evidence_name(path)] = sha256_file(path)
    return metrics, evidence


def _evidence_name(path: Path) -> str:
    """``metrics/reward.json``: the folder and the file, the same in every workspace."""
    return f"{path.parent.name}/{path.name}"


def settle(decision: GateDecision, evidence: Path, pass_file: Path | None = None) -> None:
    """Write the decision, then open or shut the gate.

    The pass file has constant content, so that editing a bound which still holds does not re-run training. It is
    removed, and :class:`GateFailed` raised, when the gate is enforced and a condition fails.
    """
    decision.save(evidence)
    if decision.opens:
        if pass_file is not None:
            atomic_write_text(pass_file, PASS_TEXT)
        return
    if pass_file is not None:
        pass_file.unlink(missing_ok=True)
    raise GateFailed(f"{decision.failure()}; evidence: {evidence}", evidence)


def _number(value: float) -> str:
    return f"{value:.0f}" if float(value).is_integer() and abs(value) < 1e9 else f"{value:.4g}"
