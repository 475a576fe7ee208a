"""The table of a run for a terminal: a row per stage and a last row for the run, fitted to width and height.

Rows are not padded to the right, so that a terminal that becomes narrower does not wrap them.
"""

from __future__ import annotations

from rich.console import Console
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.text import Text

from flows.commands.display.formats import format_metrics, format_rate, format_seconds
from flows.commands.display.run_state import RunState, StageState
from flows.commands.display.stage_progress import StageProgress

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
