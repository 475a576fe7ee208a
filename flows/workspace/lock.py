"""The locks of a workspace: one pipeline run at a time, and one attempt at a stage at a time."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import IO

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

    The lock belongs to this process and to every supervisor that inherits the descriptor. The kernel frees it when the
    last of them has ended. A holder that has died is therefore always waited for: what its supervisors still stop
    would run beside this process.

    Args:
        wait: wait for a live holder too, instead of failing.
        on_wait: given one line about the holder; a command that passes it has the option ``--wait``.

    Raises:
        RlhfError: another process holds the lock, or the file cannot be written.
        KeyboardInterrupt: the stop flag was raised while waiting.
    """
    path = private_path(workspace, name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise cannot_write(workspace, error) from error
    with handle:
        announced = False
        while not _try_lock(handle):
            holder = _read_holder(path)
            alive = holder is None or start_token(holder.pid) is not None
            if alive and not wait:
                remedy = f"wait for it{' with --wait' if on_wait else ''}, or stop it"
                raise RlhfError(f"{workspace} is in use by {holder or 'another rlhf process'}; {remedy}")
            if not announced and on_wait:
                on_wait(f"waiting for {holder or 'another rlhf process'}{'' if alive else ' to be cleaned up'}")
                announced = True
            if STOP.wait(POLL_SECONDS):
                raise KeyboardInterrupt
        command = " ".join(["rlhf", *sys.argv[1:]])
        holder = LockHolder(os.getpid(), datetime.now().isoformat(timespec="seconds"), command)
        handle.truncate(0)
        handle.write(json.dumps(asdict(holder)))
        handle.flush()
        try:
            yield handle.fileno()
        finally:
            handle.truncate(0)


def _try_lock(handle: IO[str]) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


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


def _read_holder(path: Path) -> LockHolder | None:
    try:
        return LockHolder(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
