"""Advisory file locks (flock), which the kernel frees when their holder dies."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType


class FileLock:
    """An open lock file. Closing it, or the end of the process, releases the lock.

    A child process that inherits the descriptor ``handle.fileno()`` holds the lock too.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.handle = path.open("a+", encoding="utf-8")

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.handle.close()

    def try_acquire(self) -> bool:
        """Take the lock for this process alone if nobody else holds it; return whether that succeeded."""
        try:
            fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


@contextmanager
def file_lock(path: Path, *, shared: bool = False) -> Iterator[FileLock]:
    """Wait for the lock on ``path`` and hold it for the block, alone or together with other shared holders."""
    with FileLock(path) as lock:
        fcntl.flock(lock.handle, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield lock
