"""The last words of a run: stages and their times, gates, overhead, where to look."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flows.stage.outcome import failed_conditions

EXIT_CODES = {
    "Completed": 0,
    "GateFailed": 3,
    "TrainingPaused": 4,
    "UserError": 2,
    "Preempted": 75,
    "Cancelled": 130,
}


def exit_code(state: str) -> int:
    """Status of ``rlhf run`` for the final state of the flow; 1 for any that is not known by name."""
    return EXIT_CODES.get(state, 1)


def busy_seconds(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union of ``(start, end)`` spans: time in which at least one stage worked."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def work_spans(events: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """When each stage's own command worked, from the stage events."""
    return [(e["ended"] - e["work"], e["ended"]) for e in events if e["kind"] == "stage" and e["work"] > 0]


def gate_lines(workspace: Path) -> list[str]:
    """One line per gate with evidence."""
    lines = []
    for path in sorted((workspace / "gates").glob("*.json")):
        try:
            gate = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            continue
        passed, count = gate.get("passed"), len(gate.get("conditions", []))
        detail = f"passed ({count} conditions)" if passed else f"FAILED: {failed_conditions(gate)}"
        lines.append(f"  gate {path.stem:<8} {detail}")
    return lines


def summary(workspace: Path, events: Sequence[Mapping[str, Any]], total: float) -> list[str]:
    """The lines to print at the end of a run that lasted ``total`` seconds."""
    stages = [e for e in events if e["kind"] == "stage" and e["action"] != "skipped"]
    counts = {action: sum(e["action"] == action for e in stages) for action in ("ran", "cached", "failed", "stopped")}
    busy = busy_seconds(work_spans(events))
    words = ", ".join(f"{count} {action}" for action, count in counts.items() if count)
    times = f"{total:.1f} s in all, {busy:.1f} s of stage work, {total - busy:.1f} s around it"
    lines = [f"stages: {words or 'none'}; {times}"]
    lines += gate_lines(workspace)
    report = workspace / "report.html"
    if report.is_file():
        lines.append(f"report: {report}")
    lines.append(f"logs:   {workspace / '.rlhf' / 'logs'}")
    return lines
