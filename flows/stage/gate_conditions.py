"""The conditions of a gate's decision as rows to show: values rounded, bounds with their sign, failures first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SIGNS = {">=": "≥", "<=": "≤", "worse by <": "worse by <"}
DIGITS = (4, 6, 9, 17)


@dataclass(frozen=True)
class ConditionRow:
    """One condition of a gate: ``value`` and ``bound`` are texts, such as "0.5312" and "≥ 0.65"."""

    metric: str
    passed: bool
    value: str
    bound: str
    why: str


def condition_rows(decision: Mapping[str, Any]) -> list[ConditionRow]:
    """Return a row per condition of the content of ``gates/NAME.json``, those that failed first."""
    rows = [_row(condition) for condition in decision.get("conditions", [])]
    return sorted(rows, key=lambda row: row.passed)


def _row(condition: Mapping[str, Any]) -> ConditionRow:
    value, limit = condition.get("value"), condition.get("limit")
    rest = str(condition.get("bound", ""))
    sign = next((sign for sign in SIGNS if rest.startswith(f"{sign} ")), "")
    rest = rest.removeprefix(sign).strip()
    digits = _digits_that_differ(value, limit)
    bound = _number(limit, digits) if limit is not None else rest.replace("*", "×")
    return ConditionRow(
        metric=str(condition.get("metric", "")),
        passed=bool(condition.get("passed")),
        value=str(condition.get("note") or ("missing" if value is None else _number(value, digits))),
        bound=f"{SIGNS.get(sign, '')} {bound}".strip(),
        why=str(condition.get("why", "")),
    )


def _number(value: float, digits: int) -> str:
    """Return counts in full, other numbers rounded."""
    return f"{value:.0f}" if float(value).is_integer() else f"{value:.{digits}g}"


def _digits_that_differ(value: float | None, limit: float | None) -> int:
    """Return how many digits show that two unequal numbers differ: 0.64999 must not read as 0.65."""
    if value is None or limit is None or value == limit:
        return DIGITS[0]
    return next((d for d in DIGITS if f"{value:.{d}g}" != f"{limit:.{d}g}"), DIGITS[-1])
