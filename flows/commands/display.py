"""Progress of a run: a table of its stages on a terminal, lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Column, Table
from rich.text import Text

from flows.commands.run_state import UNCOMPUTED, RunState, StageState
from flows.commands.text import PlainConsole, format_seconds, print_line
from flows.pipeline.events import (
    PipelineEvent,
    RegistryUpdated,
    StageEnded,
    StageRepeated,
    StageStarted,
)
from flows.supervision.signals import Stopwatch

PROGRESS_EVERY_SECONDS = 10.0
LONGEST_FAILURE = 70  # characters on a stage's line


class Display:
    """Prints a line per event, and every ten seconds how far the running stages are.

    ``watch`` measures the time since the command started.
    """

    def __init__(self, state: RunState, stream: IO[str]) -> None:
        self.state, self.stream = state, stream
        self.watch = Stopwatch()
        self._last_lines: dict[str, str] = {}
        self._last_tick = -PROGRESS_EVERY_SECONDS

    def phase(self, text: str) -> None:
        """Show what the run is doing now, until the next phase or stage."""
        if text and text != self.state.phase:
            self.line(text)
        self.state.enter_phase(text)

    def line(self, text: str) -> None:
        """Print one line, here with the time since the start."""
        print_line(f"[{self.watch.seconds:6.1f} s] {text}", self.stream)

    def event(self, event: PipelineEvent) -> None:
        """Show one event of the pipeline process."""
        self.state.apply(event)
        match event:
            case StageStarted(stage, pool) if pool:
                self.line(f"{stage:<12} {self.state.stages[stage].note}")
            case StageEnded(outcome) if outcome.action != "skipped":
                result = f"  {self.state.stages[outcome.stage].result}".rstrip()
                if not outcome.ok and len(result) > LONGEST_FAILURE:  # the run ends with all of it
                    result = result[:LONGEST_FAILURE] + "…"
                self.line(
                    f"{outcome.stage:<12} {outcome.action:<8} {outcome.ended - outcome.started:6.1f} s{result}"
                )
            case StageRepeated(stage, message):
                self.line(f"{stage:<12} {message}")
            case RegistryUpdated(message):
                self.line(message)
            case _:
                pass

    def tick(self) -> None:
        """Show how far the running stages are, now and then; to be called several times a second."""
        if self.watch.seconds - self._last_tick < PROGRESS_EVERY_SECONDS:
            return
        self._last_tick = self.watch.seconds
        self.state.refresh()
        for stage in self.state.running:
            latest = stage.progress.latest if stage.progress is not None else None
            if latest is not None and self._last_lines.get(stage.name) != latest.line:
                self._last_lines[stage.name] = latest.line
                self.line(f"{stage.name:<12} {latest.line.removeprefix(f'{stage.name}: ')}")

    def close(self) -> None:
        """Show nothing more; a second call does nothing."""


REFRESHES_PER_SECOND = 8
READ_LOGS_EVERY_SECONDS = 0.5
LONGEST_BAR = 24
STYLES = {"ran": "green", "cached": "green", "failed": "red", "stopped": "red", "skipped": "dim"}


def _time(stage: StageState) -> Text:
    """How long the stage took, or has been running."""
    text = ""
    if stage.outcome is not None:
        if stage.outcome.action != "skipped":
            text = format_seconds(stage.outcome.ended - stage.outcome.started)
    elif stage.progress is not None:
        text = format_seconds(time.time() - stage.started)
    return Text(text, style="dim")


def _detail(stage: StageState) -> RenderableType:
    """A bar with count, time left, rate and metrics of a running stage, or the result of another."""
    if stage.outcome is not None:
        action = stage.outcome.action
        label = "" if action == "ran" else UNCOMPUTED.get(action, action)
        result = ": ".join(filter(None, (label, stage.result)))
        style = "dim" if stage.outcome.ok else STYLES[action]
        return Text(result, style="" if action == "ran" else style)
    if stage.progress is None:
        return Text(stage.note or "waiting", style="dim")
    latest = stage.progress.latest
    if latest is None:
        return Text(stage.note or "starting", style="dim")
    bar = ProgressBar(total=latest.total, completed=latest.done, width=LONGEST_BAR)
    row = Table.grid(
        Column(max_width=LONGEST_BAR),
        Column(no_wrap=True, overflow="ellipsis"),
        padding=(0, 2, 0, 0),
    )
    row.add_row(bar, "  ".join(stage.progress.describe()))
    return row


class StageTable:
    """The stages of a run, a row each, and a last row with how many are done."""

    def __init__(self, state: RunState, console: Console, watch: Stopwatch) -> None:
        self.state, self.watch, self.final = state, watch, False
        ascii_only = console.options.ascii_only or not console.encoding.lower().startswith("utf")
        self.spinner = Spinner("line" if ascii_only else "dots", style="cyan")
        self.done, self.failed, self.waiting = "+x." if ascii_only else "✓✗·"

    def _mark(self, stage: StageState) -> RenderableType:
        """Whether a stage is done, has failed, runs or waits, in one character."""
        if stage.outcome is not None and stage.outcome.action != "skipped":
            mark = self.done if stage.outcome.ok else self.failed
            return Text(mark, style=STYLES[stage.outcome.action])
        if stage.progress is None:
            return Text(self.waiting, style="dim")
        return self.spinner.render(time.time())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the rows of the stages and the last row."""
        stages = [*self.state.stages.values()]
        if not self.final:  # the last picture has all rows, those before it the rows that fit
            ended = 0
            while ended < len(stages) and stages[ended].outcome is not None:
                ended += 1
            too_many = max(0, len(stages) + 3 - console.height)
            stages = stages[min(ended, too_many) :]
        table = Table.grid(
            Column(width=1),
            Column(no_wrap=True, overflow="ellipsis"),
            Column(width=5, justify="right"),
            Column(no_wrap=True, overflow="ellipsis", ratio=1),
            padding=(0, 1),
            expand=True,
        )
        for stage in stages:
            style = "dim" if stage.progress is None else "bold"
            name = Text(stage.name, style="" if stage.outcome else style)
            table.add_row(self._mark(stage), name, _time(stage), _detail(stage))
        for row in console.render_lines(table, pad=False) if stages else ():
            # Without the spaces that fill a row up: a terminal that becomes narrower would wrap
            # them.
            text = Text.assemble(*((segment.text, segment.style or "") for segment in row))
            text.rstrip()
            yield text
        phase, progress = self.state.phase, self.state.phase_progress
        reached = format_seconds(self.watch.seconds)
        if self.state.stages:
            reached = f"{self.state.done}/{len(self.state.stages)} stages  {reached}"
        mark = self.spinner.render(time.time()) if phase else " "
        shown = mark if isinstance(mark, Text) else " "
        detail = phase
        if progress is not None:
            detail = "  ".join([phase, *progress.describe()[:2]])
        last = Text.assemble(shown, " ", (reached, "bold"), "  ", detail)
        last.no_wrap, last.overflow = True, "ellipsis"
        yield last


class LiveDisplay(Display):
    """Keeps a table of all stages at the bottom of the terminal; other lines scroll by above it.

    A thread redraws it, so that it also moves while the command is busy.
    """

    def __init__(self, state: RunState, console: Console) -> None:
        super().__init__(state, console.file)
        self.table = StageTable(state, console, self.watch)
        self.live = Live(self.table, console=console, refresh_per_second=REFRESHES_PER_SECOND)
        self.live.start(refresh=True)

    def phase(self, text: str) -> None:
        """Show what the run is doing now; after :meth:`close` as a line."""
        if not self.live.is_started:
            self.line(text)
            return
        self.state.enter_phase(text)
        self.live.refresh()

    def line(self, text: str) -> None:
        """Print one line above the table."""
        self.live.console.print(Text(text))

    def event(self, event: PipelineEvent) -> None:
        """Show one event of the pipeline process."""
        self.state.apply(event)
        if isinstance(event, StageRepeated):
            self.line(f"{event.stage}: {event.message}")

    def tick(self) -> None:
        """Read the logs of running stages, now and then."""
        if self.watch.seconds - self._last_tick >= READ_LOGS_EVERY_SECONDS:
            self._last_tick = self.watch.seconds
            self.state.refresh()

    def close(self) -> None:
        """Leave the last table on the terminal and stop redrawing it."""
        if self.live.is_started:
            self.state.enter_phase("")
            self.table.final = True
            self.live.stop()


@contextmanager
def open_display(workspace: Path, phase: str) -> Iterator[Display]:
    """Show progress on standard output for the block, which begins with ``phase``."""
    stream, state = sys.stdout, RunState(workspace)
    plain = not stream.isatty() or os.environ.get("TERM", "") in ("", "dumb", "unknown")
    display = Display(state, stream)
    if not plain:
        display = LiveDisplay(state, PlainConsole(stream))
    try:
        display.phase(phase)
        yield display
    finally:
        display.close()
