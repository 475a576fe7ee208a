"""The DVC cache that the handed-over jobs of one host share: in use by any number of jobs, pruned when there is none.

``RLHF_HOST_CACHE_GB`` says how large it may be (100 unless set; 0 keeps everything). What goes is in the DVC remote,
from where a job that needs it fetches it again.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlhf_core.errors import RlhfError

LIMIT_VARIABLE = "RLHF_HOST_CACHE_GB"
DEFAULT_GB = 100.0
GB = 10**9


def cache_limit() -> int | None:
    """Bytes that the cache may take; None for no limit. ``RlhfError`` for what is no number."""
    given = os.environ.get(LIMIT_VARIABLE, "").strip()
    try:
        size = float(given) if given else DEFAULT_GB
    except ValueError:
        size = -1.0
    if not 0 <= size < float("inf"):
        raise RlhfError(f"{LIMIT_VARIABLE} is {given!r}; give a number of gigabytes, 0 for no limit")
    return int(size * GB) or None


@contextmanager
def in_use(host: Path) -> Iterator[None]:
    """Hold the cache of ``host`` for one job among others; when the last one leaves it is pruned."""
    limit = cache_limit()
    host.mkdir(parents=True, exist_ok=True)
    with (host / "cache.lock").open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_SH)
        yield
        # A result that has not reached the remote yet lies in a job's folder and in the cache.
        if limit is not None and not any((host / "jobs").glob("*")) and _alone(handle.fileno()):
            prune(host / "cache", limit)


def _alone(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def prune(cache: Path, limit: int) -> int:
    """Delete the files that came first until ``limit`` bytes are left; returns the bytes that went."""
    found = []
    for file in cache.rglob("*"):
        with suppress(OSError):
            if file.is_file():
                status = file.stat()
                found.append((status.st_mtime, status.st_size, file))
    surplus = sum(size for _, size, _ in found) - limit
    gone = 0
    for _, size, file in sorted(found):
        if gone >= surplus:
            break
        file.unlink(missing_ok=True)
        gone += size
    return gone
