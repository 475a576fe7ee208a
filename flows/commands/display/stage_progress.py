"""The progress of a running stage: count, rate, time left and metrics, read from its log."""

from __future__ import annotations

import time
from pathlib import Path

from flows.stage.outcome import LoggedProgress, last_progress
from flows.supervision.log_reader import LogReader

TAIL_BYTES = 4096


class StageProgress:
    """Follows the progress lines that a stage appends to its log.

    The rate is that between the first progress line of this loop and the last one, so that steps which a resumed
    stage made in an earlier process do not count.
    """

    def __init__(self, log: Path, start: int | None = None) -> None:
        self.reader = LogReader(log, start)
        self.first: LoggedProgress | None = None
        self.latest: LoggedProgress | None = None
        self.latest_at = 0.0

    def refresh(self) -> None:
        """Read what the log says now."""
        latest = last_progress(self.reader.text(TAIL_BYTES))
        if latest is None or latest == self.latest:
            return
        if self.first is None:
            # The log may be long when this process starts to follow it.
            self.first = last_progress(_first_line_with_progress(self.reader.text(first_bytes=TAIL_BYTES)))
        if self.first is None or not _same_loop(self.first, latest):
            self.first = latest
        self.latest, self.latest_at = latest, self.reader.log.stat().st_mtime

    @property
    def rate(self) -> float | None:
        """Steps per second, None while it is not known."""
        if self.latest is None or self.first is None or self.latest.seconds is None or self.first.seconds is None:
            return None
        steps, seconds = self.latest.done - self.first.done, self.latest.seconds - self.first.seconds
        if self.first is self.latest or seconds <= 0:
            steps, seconds = self.latest.done, self.latest.seconds
        return steps / seconds if steps > 0 and seconds > 0 else None

    def seconds_left(self, now: float | None = None) -> float | None:
        """Return the estimated time to the last step at ``now`` (seconds since the epoch), None if not known."""
        rate = self.rate
        if self.latest is None or rate is None:
            return None
        since = max(0.0, (time.time() if now is None else now) - self.latest_at)
        return max(0.0, (self.latest.total - self.latest.done) / rate - since)


def _first_line_with_progress(text: str) -> str:
    return next((line for line in text.splitlines() if last_progress(line)), "")


def _same_loop(first: LoggedProgress, latest: LoggedProgress) -> bool:
    """Whether two progress lines are of one loop of one process: a retry or the next loop starts anew."""
    return (
        first.description == latest.description
        and first.total == latest.total
        and first.done <= latest.done
        and (first.seconds or 0.0) <= (latest.seconds or 0.0)
    )
