"""Progress of what takes over two seconds: a bar on a terminal, elsewhere a line now and then.

Before the first bar, and where nothing can be counted, a terminal shows what is being done
(:func:`busy`).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

Item = TypeVar("Item")
# Between lines passes a tenth of the time since the start, within these bounds in seconds: the
# first steps are seen at once, and the log of a long stage stays small.
SHORTEST_INTERVAL, LONGEST_INTERVAL = 1.0, 5.0
QUIET_BELOW_SECONDS = 2.0
UNREADABLE = 1e9  # below it, all digits are easier to read than an exponent


class Progress:
    """What a loop reports to; this one shows nothing, since only the first rank reports."""

    def advance(self, n: int = 1, **metrics: float) -> None:
        """Move on by ``n`` steps and show ``metrics`` beside the count."""

    def within(self, what: str, done: int, total: int) -> None:
        """Show how far ``what``, a part of the step that is being made, has come."""


class LineProgress(Progress):
    """Prints a line to stderr every few seconds, and a last one when the work is done."""

    def __init__(self, total: int, description: str, done: int = 0) -> None:
        self.total, self.description, self.done = total, description, done
        self.metrics: dict[str, float] = {}
        self.part = ""
        self.started = self.printed = time.monotonic()
        self.printed_done = -1

    def advance(self, n: int = 1, **metrics: float) -> None:
        self.done += n
        self.metrics = metrics or self.metrics
        self.part = ""
        self._line_now_and_then()

    def within(self, what: str, done: int, total: int) -> None:
        self.part = f"{what} {done}/{total}"
        self._line_now_and_then()

    def _line_now_and_then(self) -> None:
        now = time.monotonic()
        interval = min(max((now - self.started) / 10, SHORTEST_INTERVAL), LONGEST_INTERVAL)
        if now - self.printed >= interval:
            self.line()

    def line(self) -> None:
        """Print one line: ``sft: 64/550 5 s loss 1.121``."""
        self.printed, self.printed_done = time.monotonic(), self.done
        seconds = self.printed - self.started
        shown = self.part or _format(self.metrics)
        line = f"{self.description}: {self.done}/{self.total} {seconds:.0f} s {shown}"
        print(line.rstrip(), file=sys.stderr, flush=True)

    def close(self) -> None:
        """Print the last line, unless it is printed already or the work was over at once."""
        took = time.monotonic() - self.started
        if took >= QUIET_BELOW_SECONDS and self.printed_done != self.done:
            self.line()


class BarProgress(Progress):
    """A rich bar with the remaining time and the metrics."""

    def __init__(self, bar: Any, task: Any) -> None:
        self.bar, self.task = bar, task

    def advance(self, n: int = 1, **metrics: float) -> None:
        fields = {"metrics": _format(metrics)} if metrics else {}
        self.bar.update(self.task, advance=n, **fields)

    def within(self, what: str, done: int, total: int) -> None:
        self.bar.update(self.task, metrics=f"{what} {done}/{total}")


_shown: Any = None  # the innermost ``busy``, unless something else has its line now


@contextmanager
def _in_place_of_busy() -> Iterator[None]:
    """Take the line of :func:`busy` off inside the block: two displays would overwrite each other."""
    global _shown
    outer, _shown = _shown, None
    if outer is not None:
        outer.stop()
    try:
        yield
    finally:
        if outer is not None:
            outer.start()
        _shown = outer


@contextmanager
def busy(what: str) -> Iterator[None]:
    """Say on a terminal what a command is doing while it loads and works, until it prints.

    A :func:`progress` within takes its place.
    """
    global _shown
    if not sys.stderr.isatty() or os.environ.get("RANK", "0") != "0":
        yield
        return
    from rich.console import Console
    from rich.live import Live
    from rich.spinner import Spinner

    spinner, console = Spinner("dots", f"{what}…"), Console(stderr=True)
    with (
        _in_place_of_busy(),
        Live(spinner, console=console, transient=True, redirect_stdout=False) as _shown,
    ):
        yield


_innermost = Progress()  # what the loop that runs now reports to


def within_step(what: str, done: int, total: int) -> None:
    """Show how far a part of a long step has come, in the progress of the loop that makes it."""
    _innermost.within(what, done, total)


@contextmanager
def _reporting_to(bar: Progress) -> Iterator[Progress]:
    global _innermost
    outer, _innermost = _innermost, bar
    try:
        yield bar
    finally:
        _innermost = outer


@contextmanager
def progress(total: int, description: str, done: int = 0) -> Iterator[Progress]:
    """Yield a :class:`Progress` over ``total`` units of work, closed with the block.

    Args:
        done: What an earlier process has done of it, which is said: ``sft: resumed at 300/550``.
    """
    if os.environ.get("RANK", "0") != "0":
        with _reporting_to(Progress()) as silent:
            yield silent
        return
    if done:
        print(f"{description}: resumed at {done}/{total}", file=sys.stderr, flush=True)
    if not sys.stderr.isatty():
        lines = LineProgress(total, description, done)
        with _reporting_to(lines):
            yield lines
        lines.close()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    metrics = TextColumn("{task.fields[metrics]}")
    columns = (
        "{task.description}",
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        metrics,
    )
    with _in_place_of_busy(), RichProgress(*columns, console=Console(stderr=True)) as bar:
        shown = BarProgress(bar, bar.add_task(description, total=total, completed=done, metrics=""))
        with _reporting_to(shown):
            yield shown


def track(items: Collection[Item], description: str) -> Iterator[Item]:
    """Iterate over ``items`` and show how far it got."""
    with progress(len(items), description) as bar:
        for item in items:
            yield item
            bar.advance()


def _format(metrics: dict[str, float]) -> str:
    return " ".join(f"{name} {plain_number(value, 4)}" for name, value in metrics.items())


def plain_number(value: float, digits: int, separator: str = "") -> str:
    """Write a number with ``digits`` significant digits, a larger one as a whole number."""
    large = 10**digits - 0.5 <= abs(value) < UNREADABLE
    return f"{value:{separator}.0f}" if large else f"{value:z.{digits}g}"
