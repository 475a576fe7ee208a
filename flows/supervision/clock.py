"""Clocks: monotonic time for durations and deadlines; the wall clock for timestamps only."""

from __future__ import annotations

import time

SET_BACK_SECONDS = 60.0


class Stopwatch:
    """Measures a duration by the monotonic clock, so that a change of the system date does not distort it.

    ``started`` is the time at which it was created, in seconds since the epoch.
    """

    def __init__(self) -> None:
        self.started = time.time()
        self._monotonic_start = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since the stopwatch was created."""
        return time.monotonic() - self._monotonic_start

    @property
    def now(self) -> float:
        """The present in seconds since the epoch, as ``started + seconds``: the difference to ``started`` is right."""
        return self.started + self.seconds


class WallClock:
    """Detects that the system's wall clock was set back, by comparison with the monotonic clock."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def seconds_set_back(self) -> float:
        """Return by how much the clock was set back since the last reported jump, 0 if by less than a minute.

        Smaller steps accumulate until they are reported together. A clock that is set forward gives 0.
        """
        offset = time.time() - time.monotonic()
        set_back = self._offset - offset
        if 0 <= set_back < SET_BACK_SECONDS:
            return 0.0
        self._offset = offset
        return max(set_back, 0.0)
