"""A time limit for code of the user's that may not end, such as a regular expression that backtracks without end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TimeLimitExceeded(BaseException):
    """The time is over. It is no ``Exception``, so that code under the limit does not catch it by accident."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Interrupt the block after ``seconds`` by the signal SIGALRM, which Python and its ``re`` module look for.

    Only the main thread receives signals; in another thread there is no limit.

    Raises:
        TimeLimitExceeded: The block took longer.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise TimeLimitExceeded

    earlier = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)  # again, if a bare ``except:`` has swallowed the first
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier)
