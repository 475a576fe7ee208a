"""Progress of anything that takes over two seconds: a bar on a terminal, a quiet line now and then elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

Item = TypeVar("Item")
LINE_EVERY_SECONDS = 5.0


class Progress(Protocol):
    """What a loop reports to."""

    def advance(self, n: int = 1, **figures: float) -> None:
        """Move on by ``n`` and show ``figures`` beside the count."""


class LineProgress:
    """One line every few seconds on stderr, and a last one when the work is done."""

    def __init__(self, total: int, description: str) -> None:
        self.total, self.description, self.done = total, description, 0
        self.figures: dict[str, float] = {}
        self.started = self.printed = time.monotonic()

    def advance(self, n: int = 1, **figures: float) -> None:
        self.done += n
        self.figures = figures or self.figures
        if time.monotonic() - self.printed >= LINE_EVERY_SECONDS:
            self.line()

    def line(self) -> None:
        self.printed = time.monotonic()
        seconds = self.printed - self.started
        print(f"{self.description}: {self.done}/{self.total} {seconds:.0f} s {_format(self.figures)}".rstrip(),
              file=sys.stderr, flush=True)  # fmt: skip

    def close(self) -> None:
        if time.monotonic() - self.started >= 2.0:
            self.line()


class SilentProgress:
    """Shows nothing: of several ranks that do the same, the first reports."""

    def advance(self, n: int = 1, **figures: float) -> None:
        """Accept and forget."""


class BarProgress:
    """A rich bar with the remaining time and the figures."""

    def __init__(self, bar: Any, task: Any) -> None:
        self.bar, self.task = bar, task

    def advance(self, n: int = 1, **figures: float) -> None:
        fields = {"figures": _format(figures)} if figures else {}
        self.bar.update(self.task, advance=n, **fields)


@contextmanager
def progress(total: int, description: str) -> Iterator[Progress]:
    """A :class:`Progress` over ``total`` units of work, closed with the block."""
    if os.environ.get("RANK", "0") != "0":
        yield SilentProgress()
        return
    if not sys.stderr.isatty():
        lines = LineProgress(total, description)
        yield lines
        lines.close()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with RichProgress(*columns, TextColumn("{task.fields[figures]}"), console=Console(stderr=True)) as bar:
        yield BarProgress(bar, bar.add_task(description, total=total, figures=""))


def track(items: Iterable[Item], description: str, total: int | None = None) -> Iterator[Item]:
    """Iterate over ``items`` and show how far it got. ``total`` defaults to their length."""
    count = total if total is not None else len(items)  # type: ignore[arg-type]
    with progress(count, description) as shown:
        for item in items:
            yield item
            shown.advance()


def _format(figures: dict[str, float]) -> str:
    return " ".join(f"{name} {value:.4g}" for name, value in figures.items())
