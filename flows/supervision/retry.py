"""The retry policy for servers and remotes that may be out of reach for a while."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from flows.supervision.signals import STOP, StopRequested

FIRST_PAUSE_SECONDS = 2.0
LONGEST_PAUSE_SECONDS = 60.0

T = TypeVar("T")


def retry(
    attempt: Callable[[], T],
    seconds: float,
    is_transient: Callable[[Exception], bool],
    report: Callable[[str], None],
) -> T:
    """Call ``attempt`` until it succeeds, for ``seconds`` at most; the pauses double from 2 s up to a minute.

    Args:
        is_transient: whether an error may go away by itself.
        report: is given a line for every pause.

    Raises:
        StopRequested: the stop flag was raised during a pause.
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
            raise StopRequested
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
