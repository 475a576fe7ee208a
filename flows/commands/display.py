"""Showing the progress of a run: a table of its stages on a terminal, lines elsewhere."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.text import Text

from flows.commands.run_state import RunState, StageProgress, StageState
from flows.commands.text import format_metrics, format_rate, format_seconds
from flows.pipeline.events import PipelineEvent, RegistryUpdated, StageEnded, StagePreempted, StageRetried, StageStarted
from flows.supervision.signals import Stopwatch

SHORTEST_BAR, LONGEST_BAR = 8, 24
TIME_WIDTH = 5
GAP = "  "
WIDE = 100  # from this width on, the metrics of a running stage stand in its own row
MARK_STYLES = {"ran": "green", "cached": "green", "failed": "red", "stopped": "red", "skipped": "dim"}
RESULT_STYLES = {"cached": "dim", "failed": "red", "skipped": "dim"}
LABELS = {"ran": "", "cached": "up to date", "skipped": "not started"}


class RunTable:
    """Draws the state of a run for ``console``; the marks of running stages move from one picture to the next."""

    def __init__(self, console: Console) -> None:
        self.console = console
        ascii_only = console.options.ascii_only or not console.encoding.lower().startswith("utf")
        self.spinner = Spinner("line" if ascii_only else "dots")
        self.done, self.failed, self.waiting = "+x." if ascii_only else "✓✗·"

    def draw(self, state: RunState, now: float, elapsed: float, final: bool = False) -> Text:
        """Return the rows of all stages and a last row: stages done, elapsed time, and what the run does besides.

        Args:
            now: the time in seconds since the epoch, for the times of running stages.
            elapsed: seconds since the run started.
            final: whether this is the last picture, from which no stage is dropped for want of height.
        """
        if final and not state.stages:
            return Text("", end="")
        width, height = self.console.size
        metrics_below = width < WIDE
        rows_of_running = (1 + metrics_below) * len(state.running)
        most = len(state.stages) if final else height - 3 - rows_of_running + len(state.running)
        before, visible, after = _collapse(list(state.stages.values()), most)
        name_width = min(max(map(len, state.stages), default=0), width // 2)
        rows = []
        if before:
            rows.append(Text.assemble((self.done, "green"), GAP, (f"{before} more stages done", "dim")))
        for stage in visible:
            rows.append(self._stage_row(stage, now, name_width, width))
            if metrics_below and stage in state.running and (metrics := _metrics(stage.progress)):
                indent = " " * (1 + len(GAP) + name_width + len(GAP) + TIME_WIDTH + len(GAP))
                rows.append(Text(indent + metrics, style="dim"))
        if after:
            rows.append(Text(f"{self.waiting}{GAP}{after} more stages waiting", style="dim"))
        rows.append(self._last_row(state, now, elapsed))
        for row in rows:
            row.truncate(width, overflow="ellipsis")
        return Text("\n", no_wrap=True).join(rows)

    def _stage_row(self, stage: StageState, now: float, name_width: int, width: int) -> Text:
        if stage.outcome is not None:
            action, seconds = stage.outcome.action, stage.outcome.ended - stage.outcome.started
            mark = Text({"skipped": self.waiting}.get(action, self.done if stage.outcome.ok else self.failed))
            mark.stylize(MARK_STYLES[action])
            time = "" if action == "skipped" else format_seconds(seconds)
            result = ": ".join(part for part in (LABELS.get(action, action), stage.result) if part)
            detail, name_style = Text(result, style=RESULT_STYLES.get(action, "")), RESULT_STYLES.get(action, "")
        elif stage.progress is not None:
            mark, time, name_style = self._spinner_frame(now), format_seconds(now - stage.started), "bold"
            left = 1 + len(GAP) + name_width + len(GAP) + TIME_WIDTH + len(GAP)
            detail = self._progress(stage, now, width - left)
        else:
            mark, time, name_style = Text(self.waiting, style="dim"), "", "dim"
            detail = Text(stage.note or "waiting", style="dim")
        name = Text(stage.name, style=name_style)
        name.truncate(name_width, overflow="ellipsis", pad=True)
        row = Text.assemble(mark, GAP, name, GAP, (f"{time:>{TIME_WIDTH}}", "dim"), GAP, detail)
        row.rstrip()
        return row

    def _progress(self, stage: StageState, now: float, width: int) -> Text:
        """Return a bar with count, time left, rate and metrics; what does not fit is left out, metrics first."""
        progress = stage.progress
        if progress is None or progress.latest is None:
            return Text(stage.note or "starting", style="dim")
        done, total = progress.latest.done, progress.latest.total
        left, rate, metrics = progress.seconds_left(now), progress.rate, _metrics(progress)
        remaining = "finishing" if done >= total else f"{format_seconds(left)} left" if left is not None else ""
        required = [part for part in (f"{done}/{total}", remaining) if part]
        rates = [format_rate(rate)] if rate is not None else []
        for parts in ([*required, *rates, *([metrics] if metrics else [])], [*required, *rates], required):
            text = GAP.join(parts)
            bar_width = min(width - len(text) - len(GAP), LONGEST_BAR)
            if bar_width >= SHORTEST_BAR:
                bar = self.console.render(ProgressBar(total=total, completed=done, width=bar_width))
                return Text.assemble(*((segment.text, segment.style or "") for segment in bar), GAP, text)
        return Text(GAP.join(required))

    def _last_row(self, state: RunState, now: float, elapsed: float) -> Text:
        count = f"{state.done}/{len(state.stages)} stages{GAP}" if state.stages else ""
        phase, progress = state.phase, state.phase_progress
        if progress is not None and progress.latest is not None:
            left = progress.seconds_left(now)
            phase += f"{GAP}{progress.latest.done}/{progress.latest.total}"
            phase += f"{GAP}{format_seconds(left)} left" if left is not None else ""
        mark = self._spinner_frame(now) if phase else Text(" ")
        return Text.assemble(mark, GAP, (f"{count}{format_seconds(elapsed)}", "bold"), GAP, phase)

    def _spinner_frame(self, now: float) -> Text:
        frame = self.spinner.render(now)
        assert isinstance(frame, Text)
        frame.stylize("cyan")
        return frame


def _collapse(stages: list[StageState], most: int) -> tuple[int, list[StageState], int]:
    """Choose at most ``most`` stages to show, finished and waiting ones being dropped first.

    Returns:
        How many are dropped at the top, the stages to show, how many are dropped at the bottom.
    """
    if len(stages) <= most:
        return 0, stages, 0
    running = sum(stage.outcome is None and stage.progress is not None for stage in stages)
    room = max(most - 2, running, 1)  # each end that is cut takes a row
    first_running = next((i for i, stage in enumerate(stages) if stage.outcome is None), len(stages))
    start = min(max(first_running - (room - running) // 2, 0), len(stages) - room)
    return start, stages[start : start + room], len(stages) - start - room


def _metrics(progress: StageProgress | None) -> str:
    return GAP.join(format_metrics(progress.latest.metrics)) if progress and progress.latest else ""


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

    return LiveDisplay(state, Console(file=stream, highlight=False))
