"""Python's garbage collector at the two moments when it takes seconds and frees nothing: imports and the exit."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """Run the block, which imports large libraries, without garbage collection.

    The collector runs whenever the number of objects has grown. Imports make hundreds of thousands and drop almost
    none, and the collector would take up to a quarter of their time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def skip_last_collection() -> None:
    """Keep the ending interpreter from searching all objects of the libraries for garbage.

    Handlers of ``atexit`` run before as always, and objects that nothing refers to are still destroyed.
    """
    atexit.register(gc.freeze)
