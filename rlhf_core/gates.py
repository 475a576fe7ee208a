"""Gates: metrics and conditions in, a decision with its evidence out.

A gate never trusts what it cannot read: a metric that is missing, not a number, infinite or NaN
fails its condition.
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

GATES = ("data", "sft", "reward", "policy")  # those of the recipe, in the order in which they judge
PASS_TEXT = "passed\n"
# Of the MLflow run of gate-policy: the sha256 of the evaluation that it judged.
JUDGED_TAG = "rlhf.gate.policy.judged"
REPORT_MODE = "report"
AT_LEAST, AT_MOST, WORSE_BY = ">=", "<=", "worse by <"
SHOWN_SIGNS = {AT_LEAST: "≥", AT_MOST: "≤", WORSE_BY: "worse by less than"}
LOW, HIGH = "_low95", "_high95"
DIGITS = (4, 6, 9, 17)
LOSS_DIGITS = (2, *DIGITS)  # two numbers beside each other
# What a file has of each condition.
ALWAYS = frozenset({"metric", "value", "bound", "limit", "passed", "why", "note"})


@dataclass(frozen=True)
class ConditionResult:
    """One condition with what was found. Numbers are None where they are missing or not finite.

    Attributes:
        metric: Dotted path into the metrics.
        value: What was compared with the limit; of ``worse_by_less_than`` the upper bound of the
            loss.
        bound: The sign and what follows it, as the file says it, such as ``>= 0.65``.
        limit: The bound as a number.
        note: Why there is no value, or why the condition was not asked; empty for an ordinary one.
        sign: ``>=``, ``<=`` or ``worse by <``; empty if the file was written by another program
            that gave none.
        terms: What the limit was computed from, such as ``max(1.6 * sft.length, sft.length + 0)``;
            else empty.
        estimate: The quantity itself where ``value`` is a bound of its interval: a win rate, or a
            loss.
        low95: Lower end of that interval.
        high95: Upper end of that interval.
    """

    metric: str
    value: float | None
    bound: str
    limit: float | None
    passed: bool
    why: str
    note: str = ""
    sign: str = ""
    terms: str = ""
    estimate: float | None = None
    low95: float | None = None
    high95: float | None = None

    @property
    def measured(self) -> str:
        """What was found, in words: ``0.5312``, ``missing``, ``better by 0.38, at worst …``."""
        if self.note or self.value is None:
            return self.note or "missing"
        if self.sign == WORSE_BY and self.estimate is not None:
            return describe_loss(self.estimate, self.value, self.digits)
        return number(self.value, self.digits)

    @property
    def required(self) -> str:
        """What was required, in words: ``≥ 0.65``, ``worse by less than 0.02``."""
        if not self.sign:
            return self.bound
        limit = self.terms.replace("*", "×")
        if self.limit is not None:
            limit = number(self.limit, self.digits)
        return f"{SHOWN_SIGNS.get(self.sign, self.sign)} {limit}"

    @property
    def digits(self) -> int:
        """How many digits show that value and limit differ: 0.64999 must not read as 0.65."""
        enough = LOSS_DIGITS if self.sign == WORSE_BY else DIGITS
        if self.value is None or self.limit is None or self.value == self.limit:
            return enough[0]
        for digits in enough:
            if number(self.value, digits) != number(self.limit, digits):
                return digits
        return DIGITS[-1]

    def __str__(self) -> str:
        return f"{self.metric} is {self.measured}, required {self.required}"


@dataclass(frozen=True)
class GateDecision:
    """What a gate has decided: ``gates/NAME.json`` as it is written and read.

    Attributes:
        passed: The truth about the conditions.
        mode: Whether it stops the pipeline (``enforce``) or is only recorded (``report``).
        evidence: The sha256 of what was read, by metric file.
    """

    name: str
    passed: bool
    mode: str
    conditions: tuple[ConditionResult, ...]
    evidence: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, content: Mapping[str, Any]) -> GateDecision:
        """Read the content of a gate's file, which a user's own stage may have written.

        A "passed" file without conditions, or with a failed one, counts as failed.
        """
        conditions = tuple(_condition_of(row) for row in content.get("conditions") or ())
        held = bool(conditions) and all(condition.passed for condition in conditions)
        passed = content.get("passed") is True and held
        mode = str(content.get("mode", "enforce"))
        return cls(name, passed, mode, conditions, content.get("evidence") or {})

    @classmethod
    def load(cls, path: Path) -> GateDecision:
        """Read ``gates/NAME.json``; :class:`DataError` if it is missing or not JSON."""
        return cls.of(path.stem, read_json(path))

    @property
    def opens(self) -> bool:
        """True when later stages may run: the conditions hold, or the gate only reports."""
        return self.passed or self.mode == REPORT_MODE

    @property
    def verdict(self) -> str:
        """What was decided, in words: ``passed``, ``failed``, ``failed, mode report``."""
        if self.passed:
            return "passed"
        return "failed, mode report" if self.opens else "failed"

    @property
    def failed(self) -> tuple[ConditionResult, ...]:
        """The conditions that do not hold."""
        return tuple(condition for condition in self.conditions if not condition.passed)

    @property
    def failures_first(self) -> list[ConditionResult]:
        """All conditions, those that do not hold first."""
        return sorted(self.conditions, key=lambda condition: condition.passed)

    def changed_evidence(self, workspace: Path) -> list[str]:
        """Return the files that were judged and have since changed, or are gone."""
        changed = []
        for name, judged in self.evidence.items():
            path = workspace / name
            if not path.is_file() or sha256_file(path) != judged:
                changed.append(name)
        return changed

    def as_dict(self) -> dict[str, Any]:
        """Return the content of ``gates/NAME.json``, without what a condition does not have."""
        conditions = []
        for condition in self.conditions:
            row = {}
            for key, value in asdict(condition).items():
                if key in ALWAYS or value not in (None, ""):
                    row[key] = value
            conditions.append(row)
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

    def reasons(self) -> str:
        """Return the conditions that do not hold, in one line."""
        if not self.conditions:
            return "it has no conditions"
        return "; ".join(map(str, self.failed)) or f"see gates/{self.name}.json"

    @property
    def tally(self) -> str:
        """How many conditions hold, in words."""
        count = len(self.conditions)
        if not count:
            return "it has no conditions"
        if self.failed:
            return f"{len(self.failed)} of {count} conditions do not hold"
        return "its condition holds" if count == 1 else f"all {count} conditions hold"

    def describe(self, reasons: str = "") -> str:
        """Say in one clause what was decided.

        Args:
            reasons: Why it failed; how many conditions do not hold, if empty.
        """
        if self.passed:
            return f"the {self.name} gate passed: {self.tally}"
        went_on = " (mode report: the run went on)" if self.opens else ""
        return f"the {self.name} gate failed{went_on}: {reasons or self.tally}"

    def objection(self) -> str:
        """Say which conditions keep the gate from vouching for a model; empty if it passed."""
        if self.passed:
            return ""
        if not self.conditions:
            return f"the {self.name} gate has no conditions, so it cannot vouch for a model"
        mode = f" (mode: {REPORT_MODE})" if self.mode == REPORT_MODE else ""
        metrics = ", ".join(condition.metric for condition in self.failed)
        metrics = metrics or f"see gates/{self.name}.json"
        return f"the {self.name} gate did not pass{mode}: {metrics}"


def read_gate(workspace: Path, name: str) -> GateDecision | None:
    """Read the decision of the gate ``name``; None if it has not judged ``workspace``."""
    path = workspace / "gates" / f"{name}.json"
    return GateDecision.load(path) if path.is_file() else None


def read_gates(workspace: Path) -> list[GateDecision]:
    """Read the decisions of all gates that have judged ``workspace``, by name."""
    return [GateDecision.load(path) for path in sorted((workspace / "gates").glob("*.json"))]


def closed_gate(workspace: Path) -> GateDecision | None:
    """Return the first gate that is enforced and did not pass; None if there is none."""
    for name in GATES:
        decision = read_gate(workspace, name)
        if decision is not None and not decision.opens:
            return decision
    return None


def _condition_of(row: Mapping[str, Any]) -> ConditionResult:
    """Read one condition, a number that is not finite as missing, an absent text as empty."""

    def text(name: str) -> str:
        return str(row.get(name) or "")

    def number(name: str) -> float | None:
        return lookup(row, name)[0]

    return ConditionResult(
        metric=text("metric"),
        value=number("value"),
        bound=text("bound"),
        limit=number("limit"),
        passed=row.get("passed") is True,
        why=text("why"),
        note=text("note"),
        sign=text("sign"),
        terms=text("terms"),
        estimate=number("estimate"),
        low95=number("low95"),
        high95=number("high95"),
    )


def describe_loss(loss: float, high: float, digits: int = DIGITS[0]) -> str:
    """Say how much worse the policy is and may be: ``better by 0.38, at worst by 0.29``.

    Args:
        loss: How much worse it is; negative if it is better.
        high: The upper bound of that.
        digits: How many digits each number has.
    """
    direction, worst = _direction(loss), _direction(high)
    found = f"{direction} by {number(abs(loss), digits)}" if loss else direction
    if not high:
        return f"{found}, at worst {worst}"
    towards = "" if worst == direction else f"{worst} "
    return f"{found}, at worst {towards}by {number(abs(high), digits)}"


def _direction(loss: float) -> str:
    if not loss:
        return "equal"
    return "worse" if loss > 0 else "better"


def decide(
    name: str,
    conditions: Sequence[Condition],
    metrics: Mapping[str, Any],
    *,
    mode: str = "enforce",
    evidence: Mapping[str, str] | None = None,
) -> GateDecision:
    """Check every condition against nested ``metrics``.

    A gate without conditions vouches for nothing: it fails.
    """
    results = tuple(check(condition, metrics) for condition in conditions)
    passed = bool(results) and all(result.passed for result in results)
    return GateDecision(name, passed, mode, results, dict(evidence or {}))


def check(condition: Condition, metrics: Mapping[str, Any]) -> ConditionResult:
    """Check one condition against nested ``metrics``, by its kind of bound."""
    if condition.worse_by_less_than is not None:
        return _check_loss(condition, condition.worse_by_less_than, metrics)
    value, note = lookup(metrics, condition.metric)
    sign, limit, terms = _limit(condition, metrics)
    if limit is None:
        note = note or f"{condition.at_most_of or condition.at_least_of} is missing or not finite"
    if value is None or limit is None:
        passed = False
    else:
        passed = value >= limit if sign == AT_LEAST else value <= limit
        note = "" if passed else _undecided(condition.metric, metrics)
    bound = describe_bound(condition)
    interval = _interval(condition.metric, metrics)
    return ConditionResult(
        condition.metric, value, bound, limit, passed, condition.why, note, sign, terms, **interval
    )


def _interval(metric: str, metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """Return estimate and interval that a metric belongs to, by the names of its neighbours."""
    name = metric.removesuffix(LOW).removesuffix(HIGH)
    ends = {"low95": lookup(metrics, name + LOW)[0], "high95": lookup(metrics, name + HIGH)[0]}
    if name == metric and ends["low95"] is None and ends["high95"] is None:
        return {}
    return {"estimate": lookup(metrics, name)[0], **ends}


def _undecided(metric: str, metrics: Mapping[str, Any]) -> str:
    """Say why a win rate at equal lengths is undecided; empty where it is not, or no such rate."""
    rate, _, bound = metric.rpartition("_")
    if not rate.endswith("lc_win_rate") or bound != "low95":
        return ""
    low, _ = lookup(metrics, metric)
    high, _ = lookup(metrics, f"{rate}_high95")
    share, _ = lookup(metrics, f"{rate.removesuffix('lc_win_rate')}lc_share")
    if (low, high) != (0.0, 1.0) or share is None:
        return ""
    return f"undecided: only {share:.0%} of the pairs have a counterpart whose length differs the other way"


def _check_loss(condition: Condition, margin: float, metrics: Mapping[str, Any]) -> ConditionResult:
    """Check that the policy is worse by less than the margin, or SFT has too little to lose."""
    loss = f"{LOSSES}.{condition.metric}"
    high, missing = lookup(metrics, f"{loss}.loss_high95")
    before, unknown = lookup(metrics, f"{loss}.baseline")
    estimate, _ = lookup(metrics, f"{loss}.loss")
    passed, note = high is not None and high < margin, missing
    if condition.where_at_least is not None:
        if before is None:
            passed, note, high = False, unknown, None
        elif before < condition.where_at_least:
            passed = True
            note = f"not asked: SFT's is {number(before)}, below {number(condition.where_at_least)}"
    bound = describe_bound(condition)
    return ConditionResult(
        condition.metric,
        high,
        bound,
        margin,
        passed,
        condition.why,
        note,
        WORSE_BY,
        estimate=estimate,
        high95=high,
    )


def _limit(condition: Condition, metrics: Mapping[str, Any]) -> tuple[str, float | None, str]:
    """Return the sign of a bound, its limit, and what that is computed from, if from anything."""
    if condition.at_least is not None:
        return AT_LEAST, condition.at_least, ""
    if condition.at_most is not None:
        return AT_MOST, condition.at_most, ""
    if condition.worse_by_less_than is not None:
        return WORSE_BY, condition.worse_by_less_than, ""
    factor, slack = number(condition.factor), number(condition.slack)
    if condition.at_least_of is not None:
        other = condition.at_least_of
        base, _ = lookup(metrics, other)
        limit = None if base is None else min(condition.factor * base, base - condition.slack)
        return AT_LEAST, limit, f"min({factor} * {other}, {other} - {slack})"
    other = str(condition.at_most_of)
    base, _ = lookup(metrics, other)
    limit = None if base is None else max(condition.factor * base, base + condition.slack)
    return AT_MOST, limit, f"max({factor} * {other}, {other} + {slack})"


def lookup(metrics: Mapping[str, Any], path: str) -> tuple[float | None, str]:
    """Return the finite number at a dotted path, or None and the reason.

    Keys that contain dots themselves are found too. Where metrics say themselves why one of them is
    absent, that is the reason.
    """
    value = _find(metrics, path.split("."))
    if value is None:
        return None, _absence(metrics, path)
    if isinstance(value, bool):
        return float(value), ""
    if not isinstance(value, int | float):
        return None, "not a number"
    if not math.isfinite(value):
        return None, "not finite"
    return float(value), ""


def _absence(metrics: Mapping[str, Any], path: str) -> str:
    """Say why there is no metric at a path, by what stands beside it under ``absent``."""
    group, _, name = path.rpartition(".")
    reasons = _find(metrics, [*group.split("."), ABSENT])
    if isinstance(reasons, Mapping):
        for of, reason in reasons.items():
            if name == of or name.startswith(f"{of}_"):
                return f"missing: {reason}"
    return "missing"


def _find(node: Any, parts: list[str]) -> Any:
    """Find a value by its path, in ``{"a.b": 1}`` as in ``{"a": {"b": 1}}``: the longest key wins."""
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

    If nothing is returned, metrics that pass ``conditions`` pass ``required``. A relative bound is
    guaranteed only by one with the same factor: which of two factors is stricter depends on the
    sign of the metric, which is not known.
    """
    weaker = []
    for condition in required:
        if not any(_guarantees(own, condition) for own in conditions):
            weaker.append(f"{condition.metric} {describe_bound(condition)}")
    return weaker


def _guarantees(own: Condition, required: Condition) -> bool:
    """Whether every metric that passes ``own`` passes ``required``."""
    if own.metric != required.metric:
        return False
    if own.at_least is not None and required.at_least is not None:
        return own.at_least >= required.at_least
    if own.at_most is not None and required.at_most is not None:
        return own.at_most <= required.at_most
    if own.worse_by_less_than is not None and required.worse_by_less_than is not None:
        floor, required_floor = own.where_at_least, required.where_at_least
        if floor is not None and (required_floor is None or floor > required_floor):
            return False
        return own.worse_by_less_than <= required.worse_by_less_than
    is_relative = required.at_most_of is not None or required.at_least_of is not None
    of_the_same = own.at_most_of == required.at_most_of and own.at_least_of == required.at_least_of
    if not is_relative or not of_the_same:
        return False
    return own.factor == required.factor and own.slack <= required.slack


def describe_bound(condition: Condition) -> str:
    """Return the bound of a condition in words, such as ``>= 0.65``."""
    sign, limit, terms = _limit(condition, {})
    return f"{sign} {terms or number(limit or 0.0)}"


def load_metrics(primary: Path, **others: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the metrics of several files, and their hashes by names such as ``metrics/ppo.json``.

    The primary file's metrics keep their names. The others' get their keyword as a prefix, so
    ``load_metrics(evaluation, ppo=path)`` answers to ``kl`` and ``ppo.kl``.

    Raises:
        DataError: A file is missing or not JSON.
    """
    metrics = dict(read_json(primary))
    for prefix, path in others.items():
        metrics[prefix] = read_json(path)
    evidence = {}
    for path in (primary, *others.values()):
        evidence[f"{path.parent.name}/{path.name}"] = sha256_file(path)
    return metrics, evidence


def settle(decision: GateDecision, evidence: Path, pass_file: Path | None = None) -> None:
    """Write the decision, then open or shut the gate.

    The pass file has constant content, so that editing a bound which still holds does not re-run
    training. It is removed, and :class:`GateFailed` raised, when the gate is enforced and a
    condition fails.
    """
    decision.save(evidence)
    if decision.opens:
        if pass_file is not None:
            atomic_write_text(pass_file, PASS_TEXT)
        return
    if pass_file is not None:
        pass_file.unlink(missing_ok=True)
    failure = decision.describe(decision.reasons())
    raise GateFailed(f"{failure}; evidence: {evidence}", evidence)


def number(value: float, digits: int = DIGITS[0]) -> str:
    """Write a number with so many significant digits, a whole one below 10⁹ as a count."""
    if float(value).is_integer() and abs(value) < 1e9:
        return f"{value:z.0f}"
    return f"{value:.{digits}g}"
