"""A thread that writes files while the main thread trains."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future


class BackgroundWriter:
    """Runs jobs one after another, in the order in which they were submitted, beside the calling thread.

    The thread lives as long as there are jobs. It does not keep the process alive: whoever needs a job done waits for
    its future.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._running = False

    def submit(self, job: Callable[[], None]) -> Future[None]:
        """Run ``job`` after those before it; its error becomes that of the future."""
        future: Future[None] = Future()
        with self._lock:
            self._jobs.append((job, future))
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="checkpoint-writer", daemon=True).start()
        return future

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._running = False
                    return
                job, future = self._jobs.popleft()
            try:
                job()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)
