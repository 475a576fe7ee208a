"""The live display of a run on a terminal."""

from __future__ import annotations

import threading
import time

from rich.console import Console
from rich.live import Live
from rich.text import Text

from flows.commands.display.run_state import RunState
from flows.commands.display.stage_table import RunTable
from flows.pipeline.events import PipelineEvent, StagePreempted, StageRetried
from flows.supervision.signals import Stopwatch

REFRESHES_PER_SECOND = 8
READ_LOGS_EVERY_SECONDS = 0.5


class LiveDisplay:
    """Keeps a table of all stages at the bottom of the terminal; other lines scroll by above it.

    A thread redraws it, so that it also moves while the command is busy.
    """

    def __init__(self, state: RunState, console: Console) -> None:
        self.state, self.console = state, console
        self.watch = Stopwatch()
        self._state_lock = threading.Lock()
        self._run_table = RunTable(console)
        self._final = False
        self._logs_read = -READ_LOGS_EVERY_SECONDS
        self._live = Live(
            console=console,
            get_renderable=self._table,
            refresh_per_second=REFRESHES_PER_SECOND,
            vertical_overflow="crop",
        )
        self._live.start(refresh=True)

    def phase(self, text: str) -> None:
        """Show what the run is doing now; after :meth:`close` as a line."""
        if not self._live.is_started:
            self.line(text)
            return
        with self._state_lock:
            self.state.enter_phase(text)
        self._live.refresh()

    def line(self, text: str) -> None:
        """Print one line above the table."""
        self.console.print(Text(text))

    def event(self, event: PipelineEvent) -> None:
        """Show one event of the pipeline process."""
        with self._state_lock:
            self.state.apply(event)
        if isinstance(event, StageRetried):
            self.line(f"{event.stage}: {event.message}; trying again in {event.delay_seconds:g} s")
        if isinstance(event, StagePreempted):
            self.line(f"{event.stage}: {event.message}")

    def tick(self) -> None:
        """Read the logs of running stages, now and then."""
        if self.watch.seconds - self._logs_read >= READ_LOGS_EVERY_SECONDS:
            self._logs_read = self.watch.seconds
            with self._state_lock:
                self.state.refresh()

    def close(self) -> None:
        """Leave the last table on the terminal and stop redrawing it."""
        if self._live.is_started:
            with self._state_lock:
                self.state.enter_phase("")
                self._final = True
            self._live.stop()

    def _table(self) -> Text:
        with self._state_lock:
            return self._run_table.draw(self.state, time.time(), self.watch.seconds, final=self._final)
