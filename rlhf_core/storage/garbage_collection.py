"""Python's garbage collector, paused where it takes seconds and frees almost nothing."""

from __future__ import annotations

import atexit
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# How many new objects there are before the youngest are searched, and how often these are searched
# before older ones.
RARELY = (100_000, 20, 100)

# How many blocks of all threads pause the collector now, and whether it was on before the first.
_pauses, _enabled_before = 0, True
_lock = threading.Lock()


@contextmanager
def paused_collector() -> Iterator[None]:
    """Run the block, which imports large libraries or parses modules, without garbage collection.

    The collector runs whenever the number of objects has grown. Such blocks make hundreds of
    thousands of objects and drop almost none, so the collector would take a quarter to a half of
    their time. Several threads may be in such blocks at once.
    """
    global _pauses, _enabled_before
    with _lock:
        if _pauses == 0:
            _enabled_before = gc.isenabled()
        _pauses += 1
        gc.disable()
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if _pauses == 0 and _enabled_before:
                gc.enable()


def collect_rarely() -> None:
    """From now on, look for cycles of objects after 100,000 new ones instead of some hundreds.

    Rows of data are many objects that stay, and passes of a model free theirs without a collector.
    Stages take 0.73 to 0.92 of their time, and the same memory (docs/performance.md).
    """
    gc.set_threshold(*RARELY)


def skip_last_collection() -> None:
    """Keep the ending interpreter from searching all objects of the libraries for garbage.

    Handlers of ``atexit`` run before as always, and objects that nothing refers to are still
    destroyed.
    """
    atexit.register(gc.freeze)
