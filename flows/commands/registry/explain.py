"""Why a promotion or a gate was decided as it was: what was compared, margins and bounds, and the deciding lines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from flows.commands.error_text import gate_table
from flows.registry.decisions import PromotionDecision
from flows.registry.evidence import GATES
from flows.stage.outcome import condition_rows
from rlhf_core.errors import RlhfError
from rlhf_core.storage.files import read_json, sha256_file


def explain_promotion(decision: PromotionDecision) -> Group:
    """Return what was compared with what, every criterion with its bound, and which of them decided."""
    against = f"version {decision.champion}, the champion" if decision.champion else "nothing: there was no champion"
    lines = [f"compared: version {decision.challenger} of {decision.model} with {against}"]
    if not decision.criteria:
        return Group(*lines, f"decided by: {decision.reason}")
    question = decision.question or {}
    turn = f"set {question['prompt_set']} of {question['prompt_sets']}, " if "prompt_set" in question else ""
    lines.append(
        f"judged: attempt {decision.attempt} on these test prompts ({turn}data {str(question.get('prompts'))[:12]}), "
        f"settings of section evaluate, level of the intervals 95 %"
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("", "criterion", "measured", "required"):
        table.add_column(title, overflow="fold")
    for criterion in sorted(decision.criteria, key=lambda criterion: criterion.passed):
        mark = Text("ok", style="green") if criterion.passed else Text("FAIL", style="bold red")
        table.add_row(mark, criterion.name, criterion.measured, criterion.required)
    unmet = [criterion.name for criterion in decision.criteria if not criterion.passed]
    decided = ", ".join(unmet) or f"all {len(decision.criteria)} criteria hold"
    if decision.forced:
        decided = f"force ({decision.forced}); without it: {decided}"
    return Group(*lines, Padding(table, (0, 0, 0, 2)), f"decided by: {decided}")


def gate_report(workspace: Path, name: str) -> Mapping[str, Any]:
    """Read ``gates/NAME.json``.

    Raises:
        RlhfError: There is no such gate, or it has not been decided yet.
    """
    if name not in GATES:
        raise RlhfError(f"there is no gate '{name}'; the gates are {', '.join(GATES)}")
    path = workspace / "gates" / f"{name}.json"
    if not path.is_file():
        raise RlhfError(f"gates/{name}.json does not exist: the {name} gate has not judged this workspace; `rlhf run`")
    report: Mapping[str, Any] = read_json(path)
    return report


def has_passed(report: Mapping[str, Any]) -> bool:
    """Return whether a gate has conditions and all of them hold."""
    rows = condition_rows(report)
    return report.get("passed") is True and bool(rows) and all(row.passed for row in rows)


def gate_verdict(name: str, report: Mapping[str, Any]) -> str:
    """Say in one line whether a gate passed."""
    rows = condition_rows(report)
    failed = sum(not row.passed for row in rows)
    if has_passed(report):
        return f"the {name} gate passed: {len(rows)} of {len(rows)} conditions hold"
    mode = ", but the mode is report: the pipeline went on" if report.get("mode") == "report" else ""
    return f"the {name} gate failed: {failed} of {len(rows)} conditions do not hold{mode}"


def explain_gate(workspace: Path, report: Mapping[str, Any]) -> Group:
    """Return every condition of a gate with value, bound and reason, which decided, and what they were read from."""
    unmet = [row.metric for row in condition_rows(report) if not row.passed]
    lines = [f"decided by: {', '.join(unmet) or 'all conditions hold'}"]
    for name, expected in (report.get("evidence") or {}).items():
        path = workspace / name
        same = path.is_file() and sha256_file(path) == expected
        state = "unchanged since" if same else "changed since: run `rlhf run` to judge it anew"
        lines.append(f"read from {name} (sha256 {str(expected)[:12]}, {state})")
    return Group(gate_table(report, every_reason=True), *lines)
