"""The display of a run in a pipe or a file: a line per event, without control codes."""

from __future__ import annotations

from typing import TextIO

from flows.commands.display.run_state import RunState
from flows.pipeline.events import (
    PipelineEvent,
    RegistryUpdated,
    StageEnded,
    StagePreempted,
    StageRetried,
    StageStarted,
)
from flows.supervision.signals import Stopwatch

PROGRESS_EVERY_SECONDS = 10.0


class LineDisplay:
    """Prints a line per event, and the progress of running stages every ten seconds if it has changed."""

    def __init__(self, state: RunState, stream: TextIO) -> None:
        self.state, self.stream = state, stream
        self.watch = Stopwatch()
        self._last_lines: dict[str, str] = {}
        self._last_tick = -PROGRESS_EVERY_SECONDS

    def phase(self, text: str) -> None:
        """Print what the run is doing now, unless that was printed last."""
        if text and text != self.state.phase:
            self.line(text)
        self.state.enter_phase(text)

    def line(self, text: str) -> None:
        """Print one line with the time since the start."""
        print(f"[{self.watch.seconds:6.1f} s] {text}", file=self.stream, flush=True)

    def event(self, event: PipelineEvent) -> None:
        """Print one event of the pipeline process."""
        self.state.apply(event)
        match event:
            case StageStarted(stage, pool) if pool:
                self.line(f"{stage:<12} submitted to {pool}")
            case StageEnded(outcome) if outcome.action != "skipped":
                result = f"  {self.state.stages[outcome.stage].result}".rstrip()
                self.line(f"{outcome.stage:<12} {outcome.action:<8} {outcome.ended - outcome.started:6.1f} s{result}")
            case StageRetried(stage, message, delay_seconds):
                self.line(f"{stage:<12} {message}; trying again in {delay_seconds:g} s")
            case StagePreempted(stage, message):
                self.line(f"{stage:<12} {message}")
            case RegistryUpdated(message):
                self.line(message)
            case _:
                pass

    def tick(self) -> None:
        """Print the progress of running stages, now and then."""
        if self.watch.seconds - self._last_tick < PROGRESS_EVERY_SECONDS:
            return
        self._last_tick = self.watch.seconds
        self.state.refresh()
        for stage in self.state.running:
            latest = stage.progress.latest if stage.progress is not None else None
            if latest is not None and self._last_lines.get(stage.name) != latest.line:
                self._last_lines[stage.name] = latest.line
                self.line(f"{stage.name:<12} {latest.line}")

    def close(self) -> None:
        """Print nothing more."""
