"""One stop flag per process, raised by SIGINT, SIGTERM or SIGHUP, read by everything that waits."""

from __future__ import annotations

import signal
import threading
from types import FrameType

STOP = threading.Event()
_received: list[int] = []


def install(*numbers: signal.Signals) -> None:
    """Handle the stop signals (or these ones) in this process, also where SIGINT was inherited as ignored. Main thread
    only."""
    for number in numbers or (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _on_signal)


def _on_signal(number: int, _: FrameType | None) -> None:
    _received.append(number)
    STOP.set()


def count() -> int:
    """How many stop signals have come; a second Ctrl-C means hurry."""
    return len(_received)


def last() -> int | None:
    """The latest stop signal, or None."""
    return _received[-1] if _received else None


def reset() -> None:
    """Forget earlier signals (a new run in the same process)."""
    _received.clear()
    STOP.clear()
