"""Python's garbage collector where it takes seconds and frees next to nothing: imports, stages and
the exit.
"""

from __future__ import annotations

import atexit
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# New objects before the youngest are looked through, and how often that is done before older ones
# are.
RARELY = (100_000, 20, 100)

# Blocks of all threads in which the collector pauses now, and whether it was on before the first of
# them.
_pauses, _enabled_before = 0, True
_lock = threading.Lock()


@contextmanager
def paused_collector() -> Iterator[None]:
    """Run the block, which imports large libraries or parses modules, without garbage collection.

    The collector runs whenever the number of objects has grown. Such blocks make hundreds of
    thousands and drop almost none, and the collector would take a quarter to a half of their time.
    Several threads may be in such blocks.
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
    """Have the collector look for cycles of objects after 100,000 new ones, in place of some
    hundreds, from now on.

    Rows of data are many objects that stay, and passes of a model free theirs without a collector.
    Stages take 0.73 to 0.92 of the time and the same memory (docs/performance.md).
    """
    gc.set_threshold(*RARELY)


def skip_last_collection() -> None:
    """Keep the ending interpreter from searching all objects of the libraries for garbage.

    Handlers of ``atexit`` run before as always, and objects that nothing refers to are still
    destroyed.
    """
    atexit.register(gc.freeze)
