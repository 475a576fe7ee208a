"""The stages of a run as plain lines, for ``rlhf status`` and for output that is not a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from flows.commands.display.formats import format_metrics, format_seconds
from flows.commands.display.run_state import StageState


def describe_stages(stages: Sequence[StageState], now: float) -> list[str]:
    """Return a line per stage without control codes, for output that is not a terminal."""
    width = max((len(stage.name) for stage in stages), default=0)
    return [f"{stage.name:<{width}}  {describe_stage(stage, now)}" for stage in stages]


def describe_stage(stage: StageState, now: float) -> str:
    """Describe one stage in a line: ``running 12/90, 1:02 left, reward 0.3``, ``ran in 0:51, perplexity 1.52``."""
    if stage.outcome is not None:
        outcome = stage.outcome
        if outcome.action == "skipped":
            return "not started"
        head = {"ran": "ran in {}", "cached": "up to date"}.get(outcome.action, f"{outcome.action} after {{}}")
        parts = [head.format(format_seconds(outcome.ended - outcome.started)), stage.result]
        return ", ".join(part for part in parts if part)
    if stage.progress is None:
        return stage.note or "waiting"
    latest = stage.progress.latest
    if latest is None:
        return ", ".join(part for part in (f"running for {format_seconds(now - stage.started)}", stage.note) if part)
    left = stage.progress.seconds_left(now)
    parts = [f"running {latest.done}/{latest.total}", f"{format_seconds(left)} left" if left is not None else ""]
    return ", ".join(part for part in [*parts, *format_metrics(latest.metrics)] if part)
