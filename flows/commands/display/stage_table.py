"""The table of a run for a terminal: a row per stage and a last row for the run, fitted to width and height."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from flows.commands.display.formats import format_metrics, format_rate, format_seconds
from flows.commands.display.run_state import RunState, StageState
from flows.commands.display.stage_progress import StageProgress

BAR_WIDTH = (8, 24)  # shortest and longest
TIME_WIDTH = 6
GAP = 2
WIDE = 110  # from this width on, the metrics of a running stage stand in its own row


class RunTable:
    """Draws the state of a run for ``console``; the marks of running stages move from one picture to the next."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.marks = Marks(console.options.ascii_only or not console.encoding.lower().startswith("utf"))

    def draw(self, state: RunState, now: float, elapsed: float, final: bool = False) -> RenderableType:
        """Return the rows of all stages and a last row, which holds phase, count of stages and elapsed time.

        Args:
            now: the time in seconds since the epoch, for the times of running stages.
            elapsed: seconds since the run started.
            final: whether this is the last picture, from which no stage is dropped for want of height.
        """
        width, height = self.console.size
        last_row = _last_row(state, self.marks, elapsed, now, width)
        if not state.stages:
            return Text("", end="") if final else last_row
        name_width = min(max(map(len, state.stages)), width // 2)
        detail_width = max(width - 1 - name_width - TIME_WIDTH - 3 * GAP, BAR_WIDTH[0])
        table = Table.grid(padding=(0, GAP, 0, 0), pad_edge=False, expand=True)
        table.add_column(width=1)
        table.add_column(width=name_width, no_wrap=True, overflow="ellipsis")
        table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        table.add_column(width=TIME_WIDTH, justify="right", no_wrap=True)
        metrics_below = width < WIDE
        rows_of_running = (1 + metrics_below) * len(state.running)
        most = len(state.stages) if final else height - 3 - rows_of_running + len(state.running)
        before, shown, after = _collapse(list(state.stages.values()), most)
        if before:
            table.add_row(self.marks.done, "", Text(f"{before} more stages done", style="dim"), "")
        for stage in shown:
            mark, name = self.marks.of(stage), Text(stage.name, style=_name_style(stage))
            table.add_row(mark, name, *_cells(stage, now, detail_width))
            if metrics_below and stage in state.running and (metrics := _metrics(stage.progress)):
                table.add_row("", "", Text(metrics, style="dim"), "")
        if after:
            table.add_row(self.marks.waiting, "", Text(f"{after} more stages waiting", style="dim"), "")
        return Group(table, last_row)


class Marks:
    """The first column: a sign for the state of each stage."""

    def __init__(self, ascii_only: bool) -> None:
        self.spinner = Spinner("line" if ascii_only else "dots", style="cyan")
        self.done = Text("+" if ascii_only else "✓", style="green")
        self.failed = Text("x" if ascii_only else "✗", style="red")
        self.waiting = Text("." if ascii_only else "·", style="dim")

    def of(self, stage: StageState) -> RenderableType:
        if stage.outcome is not None:
            if stage.outcome.action == "skipped":
                return self.waiting
            return self.done if stage.outcome.ok else self.failed
        return self.spinner if stage.progress is not None else self.waiting


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


def _name_style(stage: StageState) -> str:
    if stage.outcome is None:
        return "bold" if stage.progress is not None else "dim"
    return "red" if stage.outcome.action == "failed" else ""


def _cells(stage: StageState, now: float, width: int) -> tuple[RenderableType, RenderableType]:
    """Return what a stage does or has produced, and its time."""
    if stage.outcome is not None:
        outcome = stage.outcome
        label = {"ran": "", "cached": "up to date", "skipped": "not started"}.get(outcome.action, outcome.action)
        text = ": ".join(part for part in (label, stage.result) if part) or "done"
        style = {"failed": "red", "cached": "dim", "skipped": "dim"}.get(outcome.action, "")
        time = format_seconds(outcome.ended - outcome.started) if outcome.action != "skipped" else ""
        return Text(text, style=style), Text(time, style="dim")
    if stage.progress is None:
        return Text(stage.note or "waiting", style="dim"), ""
    running_time = Text(format_seconds(now - stage.started), style="dim")
    if stage.progress.latest is None:
        return Text(stage.note or "starting", style="dim"), running_time
    return _progress(stage.progress, now, width), running_time


def _progress(progress: StageProgress, now: float, width: int) -> RenderableType:
    """Return a bar with count, time left, rate and metrics; what does not fit is left out, metrics first."""
    assert progress.latest is not None
    done, total = progress.latest.done, progress.latest.total
    count = f"{done}/{total}"
    left = progress.seconds_left(now)
    times = [f"{format_seconds(left)} left"] if left is not None else []
    rate = [format_rate(progress.rate)] if progress.rate is not None else []
    metrics = [_metrics(progress)] if _metrics(progress) else []
    for parts in ([count, *times, *rate, *metrics], [count, *times, *rate], [count, *times]):
        text = "  ".join(parts)
        bar_width = min(width - len(text) - GAP, BAR_WIDTH[1])
        if bar_width >= BAR_WIDTH[0]:
            grid = Table.grid(padding=(0, GAP, 0, 0))
            grid.add_row(ProgressBar(total=total, completed=done, width=bar_width), Text(text))
            return grid
    return Text("  ".join([count, *times]))


def _metrics(progress: StageProgress | None) -> str:
    return "  ".join(format_metrics(progress.latest.metrics)) if progress and progress.latest else ""


def _last_row(state: RunState, marks: Marks, elapsed: float, now: float, width: int) -> RenderableType:
    table = Table.grid(padding=(0, GAP, 0, 0), pad_edge=False, expand=True)
    table.add_column(width=1)
    table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    table.add_column(justify="right", no_wrap=True)
    count = f"{state.done}/{len(state.stages)}{' stages' if width >= 60 else ''}  " if state.stages else ""
    phase = state.phase
    if state.phase_progress is not None and state.phase_progress.latest is not None:
        latest, left = state.phase_progress.latest, state.phase_progress.seconds_left(now)
        phase += f"  {latest.done}/{latest.total}" + (f"  {format_seconds(left)} left" if left is not None else "")
    mark = marks.spinner if phase else ""
    table.add_row(mark, Text(phase), Text(f"{count}{format_seconds(elapsed)}", style="bold"))
    return table
