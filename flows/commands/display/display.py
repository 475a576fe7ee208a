"""Showing the progress of a run: live on a terminal, as lines elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TextIO

from flows.commands.display.lines import LineDisplay
from flows.commands.display.run_state import RunState
from flows.pipeline.events import PipelineEvent
from flows.supervision.signals import Stopwatch


class Display(Protocol):
    """What a command reports its progress to. ``watch`` measures the time since the command started."""

    watch: Stopwatch

    def phase(self, text: str) -> None:
        """Show what the run is doing now, until the next phase or stage."""

    def line(self, text: str) -> None:
        """Print one line."""

    def event(self, event: PipelineEvent) -> None:
        """Show one event of the pipeline process."""

    def tick(self) -> None:
        """Show how far the running stages are. To be called several times a second."""

    def close(self) -> None:
        """Show nothing more; a second call does nothing."""


@contextmanager
def open_display(workspace: Path, phase: str, stream: TextIO | None = None) -> Iterator[Display]:
    """Show progress on ``stream`` (stdout by default) for the block, which begins with ``phase``."""
    stream = stream or sys.stdout
    display = _display(RunState(workspace), stream)
    try:
        display.phase(phase)
        yield display
    finally:
        display.close()


def _display(state: RunState, stream: TextIO) -> Display:
    if not stream.isatty() or os.environ.get("TERM", "") in ("", "dumb", "unknown"):
        return LineDisplay(state, stream)
    from rich.console import Console

    from flows.commands.display.live import LiveDisplay

    return LiveDisplay(state, Console(file=stream, highlight=False))
