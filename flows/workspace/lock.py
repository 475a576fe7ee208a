"""The workspace lock: one pipeline run per workspace at a time."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from flows.supervision.file_lock import FileLock
from flows.supervision.processes import OWNER_VARIABLE, start_token
from flows.supervision.signals import STOP
from flows.workspace.folder import PRIVATE, cannot_write, private_path
from rlhf_core.errors import RlhfError

LOCK_HELD_VARIABLE = "RLHF_LOCK_HELD"
WORKSPACE_LOCK = "lock"
POLL_SECONDS = 0.3


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
            holder = _describe(_read_holder(path))
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


def lock_holder(workspace: Path) -> str | None:
    """Describe the command that holds the workspace now, None if none does. The lock itself is not touched."""
    record = _read_holder(workspace / PRIVATE / WORKSPACE_LOCK)
    return _describe(record) if record and start_token(record["pid"]) is not None else None


def _write_holder(handle: IO[str]) -> None:
    command = " ".join(["rlhf", *sys.argv[1:]])
    record = {"pid": os.getpid(), "since": datetime.now().isoformat(timespec="seconds"), "command": command}
    handle.truncate(0)
    handle.write(json.dumps(record))
    handle.flush()


def _read_holder(path: Path) -> dict[str, Any] | None:
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return {"pid": int(record["pid"]), "since": record["since"], "command": record["command"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _describe(record: dict[str, Any] | None) -> str:
    if record is None:
        return "another rlhf process"
    return f"`{record['command']}` (pid {record['pid']}, since {record['since']})"
