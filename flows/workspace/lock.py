"""The workspace lock: one pipeline run per workspace at a time."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import IO

from flows.supervision.file_lock import FileLock
from flows.supervision.processes import OWNER_VARIABLE, start_token
from flows.supervision.signals import STOP
from flows.workspace.folder import PRIVATE, cannot_write, private_path
from rlhf_core.errors import RlhfError

LOCK_HELD_VARIABLE = "RLHF_LOCK_HELD"
WORKSPACE_LOCK = "lock"
POLL_SECONDS = 0.3


@dataclass(frozen=True)
class LockHolder:
    """The command that holds a lock, as it is recorded in the lock file; ``since`` is a local time."""

    pid: int
    since: str
    command: str

    def __str__(self) -> str:
        return f"`{self.command}` (pid {self.pid}, since {self.since})"


@contextmanager
def locked(
    workspace: Path, name: str = WORKSPACE_LOCK, *, wait: bool = False, on_wait: Callable[[str], None] | None = None
) -> Iterator[int]:
    """Hold the lock ``.rlhf/NAME`` for the block; yield its file descriptor.

    The lock belongs to this process, and to a child only if it inherits the descriptor. The kernel frees it when they
    have ended.

    Args:
        wait: wait for another holder instead of failing; ``on_wait`` is then given one line about the holder.

    Raises:
        RlhfError: another process holds the lock, or the file cannot be written.
        KeyboardInterrupt: the stop flag was raised while waiting.
    """
    path = private_path(workspace, name)
    try:
        lock = FileLock(path)
    except OSError as error:
        raise cannot_write(workspace, error) from error
    with lock:
        announced = False
        while not lock.try_acquire():
            holder = str(_read_holder(path) or "another rlhf process")
            if not wait:
                raise RlhfError(f"{workspace} is in use by {holder}; wait for it with --wait, or stop it")
            if not announced and on_wait:
                on_wait(f"waiting for {holder}")
                announced = True
            if STOP.wait(POLL_SECONDS):
                raise KeyboardInterrupt
        _write_holder(lock.handle)
        try:
            yield lock.handle.fileno()
        finally:
            lock.handle.truncate(0)


@contextmanager
def locked_unless_inherited(workspace: Path) -> Iterator[None]:
    """Hold the workspace lock for the block, unless the command that started this process holds it already."""
    holder_tag = os.environ.get(LOCK_HELD_VARIABLE, "")
    if holder_tag and holder_tag == os.environ.get(OWNER_VARIABLE) and holder_tag.endswith(f":{workspace}"):
        yield
        return
    with locked(workspace, wait=True):
        yield


def lock_holder(workspace: Path) -> LockHolder | None:
    """Return the live command that holds the workspace, None if there is none. The lock itself is not touched."""
    holder = _read_holder(workspace / PRIVATE / WORKSPACE_LOCK)
    return holder if holder is not None and start_token(holder.pid) is not None else None


def _write_holder(handle: IO[str]) -> None:
    command = " ".join(["rlhf", *sys.argv[1:]])
    holder = LockHolder(os.getpid(), datetime.now().isoformat(timespec="seconds"), command)
    handle.truncate(0)
    handle.write(json.dumps(asdict(holder)))
    handle.flush()


def _read_holder(path: Path) -> LockHolder | None:
    try:
        return LockHolder(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
