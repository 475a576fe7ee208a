"""Waiting: the stop flag of this process, clocks, and the retry policy that obeys the flag."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

STOP = threading.Event()
_received: list[int] = []


def install(*numbers: signal.Signals) -> None:
    """Handle the stop signals, or those given, in this process, even where SIGINT was inherited as
    ignored.

    Must be called in the main thread.
    """
    for number in numbers or (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _on_signal)


def _on_signal(number: int, _: FrameType | None) -> None:
    _received.append(number)
    STOP.set()


def last() -> int | None:
    """Return the latest stop signal, None if there was none."""
    return _received[-1] if _received else None


SET_BACK_SECONDS = 60.0


class Stopwatch:
    """Measures a duration by the monotonic clock, so that a change of the system date does not
    distort it.

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
        """The present in seconds since the epoch, as ``started + seconds``: the difference to
        ``started`` is right.
        """
        return self.started + self.seconds


class WallClock:
    """Detects that the system's wall clock was set back, by comparison with the monotonic clock."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def seconds_set_back(self) -> float:
        """Return by how much the clock was set back since the last reported jump, 0 if by less than
        a minute.

        Smaller steps accumulate until they are reported together. A clock that is set forward gives
        0.
        """
        offset = time.time() - time.monotonic()
        set_back = self._offset - offset
        if 0 <= set_back < SET_BACK_SECONDS:
            return 0.0
        self._offset = offset
        return max(set_back, 0.0)


FIRST_PAUSE_SECONDS = 2.0
LONGEST_PAUSE_SECONDS = 60.0

T = TypeVar("T")


def retry(
    attempt: Callable[[], T],
    seconds: float,
    is_transient: Callable[[Exception], bool],
    report: Callable[[str], None],
) -> T:
    """Call ``attempt`` until it succeeds, for ``seconds`` at most; the pauses double from 2 s up to
    a minute.

    Args:
        is_transient: whether an error may go away by itself.
        report: is given a line for every pause.

    Raises:
        KeyboardInterrupt: the stop flag was raised during a pause.
        Exception: the error of the last attempt, when it is not transient or the time is over.
    """
    deadline = time.monotonic() + seconds
    pause = FIRST_PAUSE_SECONDS
    while True:
        try:
            return attempt()
        except Exception as error:
            if not is_transient(error) or time.monotonic() + pause > deadline:
                raise
            report(f"{error}; trying again in {pause:.0f} s")
        if STOP.wait(pause):
            raise KeyboardInterrupt
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
