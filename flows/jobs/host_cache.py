"""The DVC cache that remote jobs on one host share: kept while a job uses it, pruned by the last job that leaves it.

``RLHF_HOST_CACHE_GB`` limits its size (default 100, 0 for no limit). Everything in it is in the DVC remote too, from
where a job fetches again what was deleted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flows.supervision.file_lock import file_lock
from rlhf_core.errors import RlhfError

LIMIT_VARIABLE = "RLHF_HOST_CACHE_GB"
DEFAULT_GB = 100.0
GB = 10**9


def cache_limit() -> int | None:
    """Return the size limit of the cache in bytes, None for no limit.

    Raises:
        RlhfError: the environment variable is not a number.
    """
    limit = os.environ.get(LIMIT_VARIABLE, "").strip()
    try:
        gigabytes = float(limit) if limit else DEFAULT_GB
    except ValueError:
        gigabytes = -1.0
    if not 0 <= gigabytes < float("inf"):
        raise RlhfError(f"{LIMIT_VARIABLE} is {limit!r}; give a number of gigabytes, 0 for no limit")
    return int(gigabytes * GB) or None


@contextmanager
def host_cache_in_use(host_folder: Path) -> Iterator[None]:
    """Use the cache of ``host_folder`` for the block, beside other jobs; the last job to leave prunes it."""
    limit = cache_limit()
    with file_lock(host_folder / "cache.lock", shared=True) as lock:
        yield
        # A job folder that is still there holds a result that has not reached the remote, and so does the cache.
        undelivered = any((host_folder / "jobs").glob("*"))
        if limit is not None and not undelivered and lock.try_acquire():
            prune(host_folder / "cache", limit)


def prune(cache: Path, limit: int) -> int:
    """Delete the oldest files until ``limit`` bytes are left; return how many bytes were deleted."""
    files = []
    for path in cache.rglob("*"):
        with suppress(OSError):
            if path.is_file():
                status = path.stat()
                files.append((status.st_mtime, status.st_size, path))
    surplus = sum(size for _, size, _ in files) - limit
    deleted = 0
    for _, size, path in sorted(files):
        if deleted >= surplus:
            break
        path.unlink(missing_ok=True)
        deleted += size
    return deleted
