"""One thread that writes files while the main thread trains."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

NICENESS = 10  # added to the process's own: training goes first where cores are short


class BackgroundWriter:
    """Runs jobs one after another, in the order in which they were submitted, in a thread of its own.

    The thread is started with the first job and ends with the process: whoever needs a job done waits for its future.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Callable[[], None], Future[None]]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], None]) -> Future[None]:
        """Run ``job`` after those before it; its error becomes that of the future."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="checkpoint-writer", daemon=True)
            self._thread.start()
        future: Future[None] = Future()
        self._jobs.put((job, future))
        return future

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # threads have a priority of their own on Linux alone
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)
        while True:
            job, future = self._jobs.get()
            try:
                job()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)
