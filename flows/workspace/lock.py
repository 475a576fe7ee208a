"""The workspace lock: one pipeline run per workspace, held by flock and freed by the kernel when its holder dies."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import IO

from flows.supervision.processes import OWNER_VARIABLE
from flows.supervision.signals import STOP
from flows.workspace.folder import cannot_write, private_path
from rlhf_core.errors import RlhfError

LOCK_HELD_VARIABLE = "RLHF_LOCK_HELD"


@contextmanager
def locked(
    workspace: Path, name: str = "lock", *, wait: bool = False, on_wait: Callable[[str], None] | None = None
) -> Iterator[int]:
    """Hold ``.rlhf/NAME`` (flock) for the block. A holder elsewhere: wait for it, or ``RlhfError`` in one line.

    The lock belongs to this process alone, and the kernel frees it when the process dies. Only a child that is handed
    the descriptor that this yields holds it too.
    """
    path = private_path(workspace, name)
    try:
        handle = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise cannot_write(workspace, error) from error
    with handle:
        _acquire(handle, workspace, wait, on_wait)
        _write_holder(handle)
        try:
            yield handle.fileno()
        finally:
            handle.truncate(0)


def _acquire(handle: IO[str], workspace: Path, wait: bool, on_wait: Callable[[str], None] | None) -> None:
    told = False
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            holder = _describe(handle)
            if not wait:
                raise RlhfError(f"{workspace} is in use by {holder}; wait for it with --wait, or stop it") from error
            if not told and on_wait:
                on_wait(f"waiting for {holder}")
                told = True
            if STOP.wait(0.3):
                raise KeyboardInterrupt from error


def _describe(handle: IO[str]) -> str:
    handle.seek(0)
    try:
        record = json.loads(handle.read())
        return f"`{record['command']}` (pid {record['pid']}, since {record['since']})"
    except (ValueError, KeyError):
        return "another rlhf process"


def _write_holder(handle: IO[str]) -> None:
    command = " ".join(["rlhf", *sys.argv[1:]])
    record = {"pid": os.getpid(), "since": datetime.now().isoformat(timespec="seconds"), "command": command}
    handle.truncate(0)
    handle.write(json.dumps(record))
    handle.flush()


@contextmanager
def locked_unless_inherited(workspace: Path) -> Iterator[None]:
    """Hold the workspace for the block, unless the command that started this process already does."""
    held = os.environ.get(LOCK_HELD_VARIABLE, "")
    if held and held == os.environ.get(OWNER_VARIABLE) and held.endswith(f":{workspace}"):
        yield
        return
    with locked(workspace, wait=True):
        yield
