"""Time that nobody sets: durations and waits go by the monotonic clock; the wall clock is only for telling the time."""

from __future__ import annotations

import time

SET_BACK_SECONDS = 60.0


class Stopwatch:
    """``started`` is in seconds since the epoch, ``seconds`` what has passed since, whatever became of the date."""

    def __init__(self) -> None:
        self.started = time.time()
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since the stopwatch was made."""
        return time.monotonic() - self._began

    @property
    def now(self) -> float:
        """``started`` plus ``seconds``: never before ``started``, and the end of a duration that is right."""
        return self.started + self.seconds


class WallClock:
    """Notices that the wall clock was set back, against the monotonic clock."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def set_back(self) -> float:
        """Seconds by which the clock was set back since the last call; 0 for less than ``SET_BACK_SECONDS``.

        Small steps add up: they are forgotten only once they have been told. A clock set forward is not told.
        """
        offset = time.time() - time.monotonic()
        back = self._offset - offset
        if 0 <= back < SET_BACK_SECONDS:
            return 0.0
        self._offset = offset
        return max(back, 0.0)
