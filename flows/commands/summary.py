"""The summary at the end of a run: stages and their times, gates, where to find report and logs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from flows.pipeline.events import PipelineEvent, StageEnded
from flows.stage.outcome import StageOutcome, failed_conditions

EXIT_CODES = {
    "Completed": 0,
    "GateFailed": 3,
    "TrainingPaused": 4,
    "UserError": 2,
    "Preempted": 75,
    "Cancelled": 130,
}


def exit_code(state: str) -> int:
    """Return the exit status of ``rlhf run`` for the final state of the flow; 1 for an unknown name."""
    return EXIT_CODES.get(state, 1)


def busy_seconds(spans: Sequence[tuple[float, float]]) -> float:
    """Return the length of the union of ``(start, end)`` spans: the time in which at least one stage worked."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def work_spans(outcomes: Sequence[StageOutcome]) -> list[tuple[float, float]]:
    """Return when each stage's own command worked."""
    return [(o.ended - o.work_seconds, o.ended) for o in outcomes if o.work_seconds > 0]


def gate_lines(workspace: Path) -> list[str]:
    """Return one line per gate with evidence."""
    lines = []
    for path in sorted((workspace / "gates").glob("*.json")):
        try:
            gate = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            continue
        passed, count = gate.get("passed"), len(gate.get("conditions", []))
        verdict = f"passed ({count} conditions)" if passed else f"FAILED: {failed_conditions(gate)}"
        lines.append(f"  gate {path.stem:<8} {verdict}")
    return lines


def summary(workspace: Path, events: Sequence[PipelineEvent], total: float) -> list[str]:
    """Return the lines to print at the end of a run that lasted ``total`` seconds."""
    outcomes = [event.outcome for event in events if isinstance(event, StageEnded)]
    actions = [outcome.action for outcome in outcomes]
    counts = [f"{actions.count(a)} {a}" for a in ("ran", "cached", "failed", "stopped") if a in actions]
    busy = busy_seconds(work_spans(outcomes))
    times = f"{total:.1f} s in all, {busy:.1f} s of stage work, {total - busy:.1f} s around it"
    lines = [f"stages: {', '.join(counts) or 'none'}; {times}"]
    lines += gate_lines(workspace)
    report = workspace / "report.html"
    if report.is_file():
        lines.append(f"report: {report}")
    lines.append(f"logs:   {workspace / '.rlhf' / 'logs'}")
    return lines
