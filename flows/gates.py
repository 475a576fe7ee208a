"""What gates have decided, as ``gates/NAME.json`` says it: the reader of everything that shows or relies on a gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rlhf_core.storage.files import read_json

GATES = ("data", "sft", "reward", "policy")  # those of the recipe, in the order in which they judge
REPORT_MODE = "report"
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


@dataclass(frozen=True)
class GateReport:
    """The decision of the gate ``name``; ``content`` is that of its file, which a stage of one's own may have written.

    A file that says "passed" and has no conditions, or one that does not hold, is not believed.
    """

    name: str
    content: Mapping[str, Any]

    @cached_property
    def rows(self) -> list[ConditionRow]:
        """A row for each condition, those that failed first."""
        return sorted(map(_row, self.content.get("conditions") or []), key=lambda row: row.passed)

    @property
    def failed(self) -> list[str]:
        """The metrics of the conditions that do not hold."""
        return [row.metric for row in self.rows if not row.passed]

    @property
    def passed(self) -> bool:
        """Whether the gate has conditions and all of them hold."""
        return self.content.get("passed") is True and bool(self.rows) and not self.failed

    @property
    def mode(self) -> str:
        """``enforce``, or ``report`` for a gate that stops nothing."""
        return str(self.content.get("mode", "enforce"))

    @property
    def evidence(self) -> Mapping[str, str]:
        """The hash of each file that was judged, by its path in the workspace."""
        return self.content.get("evidence") or {}

    def objection(self) -> str:
        """Why the gate does not vouch for a model; empty if it passed."""
        if self.passed:
            return ""
        if not self.rows:
            return f"the {self.name} gate has no conditions, so it cannot vouch for a model"
        mode = " (mode: report)" if self.mode == REPORT_MODE else ""
        return f"the {self.name} gate did not pass{mode}: {', '.join(self.failed) or f'see gates/{self.name}.json'}"

    def failed_conditions(self) -> str:
        """The conditions that do not hold, in one line."""
        return "; ".join(f"{row.metric} is {row.value}, bound {row.bound}" for row in self.rows if not row.passed)


def read_gate(workspace: Path, name: str) -> GateReport | None:
    """Read the decision of the gate ``name``; None if it has not judged ``workspace``."""
    path = workspace / "gates" / f"{name}.json"
    return GateReport(name, read_json(path)) if path.is_file() else None


def read_gates(workspace: Path) -> list[GateReport]:
    """Read the decisions of all gates that have judged ``workspace``, by name."""
    return [GateReport(path.stem, read_json(path)) for path in sorted((workspace / "gates").glob("*.json"))]


def _row(condition: Mapping[str, Any]) -> ConditionRow:
    value, limit = condition.get("value"), condition.get("limit")
    rest = str(condition.get("bound", ""))
    sign = next((sign for sign in SIGNS if rest.startswith(f"{sign} ")), "")
    rest = rest.removeprefix(sign).strip()
    digits = _digits_that_differ(value, limit)
    bound = _number(limit, digits) if limit is not None else rest.replace("*", "×")
    return ConditionRow(
        metric=str(condition.get("metric", "")),
        passed=condition.get("passed") is True,
        value=str(condition.get("note") or ("missing" if value is None else _number(value, digits))),
        bound=f"{SIGNS.get(sign, '')} {bound}".strip(),
        why=str(condition.get("why", "")),
    )


def _number(value: float, digits: int) -> str:
    return f"{value:.0f}" if float(value).is_integer() else f"{value:.{digits}g}"


def _digits_that_differ(value: float | None, limit: float | None) -> int:
    """Return how many digits show that two unequal numbers differ: 0.64999 must not read as 0.65."""
    if value is None or limit is None or value == limit:
        return DIGITS[0]
    return next((d for d in DIGITS if f"{value:.{d}g}" != f"{limit:.{d}g}"), DIGITS[-1])
