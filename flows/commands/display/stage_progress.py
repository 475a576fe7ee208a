"""The progress of a running stage: count, rate, time left and metrics, read from its log."""

from __future__ import annotations

import time
from pathlib import Path

from flows.stage.outcome import LoggedProgress, progress_lines
from flows.supervision.processes import LogReader

TAIL_BYTES = 4096


class StageProgress:
    """Follows the progress lines that a stage appends to its log.

    The rate is that of the last minutes, between the first and the last of the lines that one loop has printed last.
    So steps which a resumed stage made in an earlier process do not count.
    """

    def __init__(self, log: Path, start: int | None = None) -> None:
        self.reader = LogReader(log, start)
        self.first: LoggedProgress | None = None
        self.latest: LoggedProgress | None = None
        self.latest_at = 0.0
        self._abandoned: LoggedProgress | None = None

    def refresh(self) -> None:
        """Read what the log says now."""
        lines = progress_lines(self.reader.text(TAIL_BYTES))
        if not lines or lines[-1] in (self.latest, self._abandoned):
            return
        self.latest, self.latest_at = lines[-1], self.reader.log.stat().st_mtime
        self.first = self.latest
        for line in reversed(lines):
            if not _same_loop(line, self.first):
                break
            self.first = line

    def restart(self) -> None:
        """Forget the progress so far: the stage starts anew."""
        self._abandoned, self.first, self.latest = self.latest, None, None

    @property
    def rate(self) -> float | None:
        """Steps per second, None while it is not known."""
        if self.latest is None or self.first is None or self.latest.seconds is None or self.first.seconds is None:
            return None
        steps, seconds = self.latest.done - self.first.done, self.latest.seconds - self.first.seconds
        if seconds <= 0:
            steps, seconds = self.latest.done, self.latest.seconds
        return steps / seconds if steps > 0 and seconds > 0 else None

    def seconds_left(self, now: float | None = None) -> float | None:
        """Return the estimated time to the last step at ``now`` (seconds since the epoch), None if not known."""
        rate = self.rate
        if self.latest is None or rate is None:
            return None
        since = max(0.0, (time.time() if now is None else now) - self.latest_at)
        return max(0.0, (self.latest.total - self.latest.done) / rate - since)


def _same_loop(earlier: LoggedProgress, later: LoggedProgress) -> bool:
    """Whether two progress lines are of one loop of one process: a retry or the next loop starts anew."""
    return (
        earlier.description == later.description
        and earlier.total == later.total
        and earlier.done <= later.done
        and (earlier.seconds or 0.0) <= (later.seconds or 0.0)
    )
