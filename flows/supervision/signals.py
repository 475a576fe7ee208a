"""The stop flag of this process: raised by SIGINT, SIGTERM or SIGHUP, checked by everything that waits."""

from __future__ import annotations

import signal
import threading
from types import FrameType

STOP = threading.Event()
_received: list[int] = []


class StopRequested(Exception):
    """Ends work that was in progress when the stop flag was raised."""


def install(*numbers: signal.Signals) -> None:
    """Handle the stop signals, or those given, in this process, even where SIGINT was inherited as ignored.

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


def reset() -> None:
    """Forget earlier signals, for a new run in the same process."""
    _received.clear()
    STOP.clear()
