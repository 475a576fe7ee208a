"""A workspace: a folder with params.yaml and dvc.yaml. Finding it, its private places, its lock."""

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

from flows.processes import OWNER_VARIABLE, birth, is_alive
from flows.signals import STOP
from rlhf_core.errors import RlhfError

PRIVATE = ".rlhf"
LOCK_HELD_VARIABLE = "RLHF_LOCK_HELD"


def find_workspace(given: Path | None = None) -> Path:
    """The absolute path of ``given``, or of the nearest folder upward that is a workspace; ``RlhfError`` if none is."""
    if given is not None:
        if not is_workspace(given):
            raise RlhfError(f"{given} is no workspace (params.yaml and dvc.yaml); make one with: rlhf init {given}")
        return given.resolve()
    here = Path.cwd().resolve()
    for folder in (here, *here.parents):
        if is_workspace(folder):
            return folder
    raise RlhfError(f"no workspace at or above {here}; make one with `rlhf init DIR`, or name one with --workspace DIR")


def is_workspace(folder: Path) -> bool:
    """Whether ``folder`` holds params.yaml and dvc.yaml."""
    return (folder / "params.yaml").is_file() and (folder / "dvc.yaml").is_file()


def private(workspace: Path, *parts: str) -> Path:
    """A path under the workspace's own ``.rlhf`` folder, which is created; ``RlhfError`` if that cannot be."""
    path = workspace.joinpath(PRIVATE, *parts)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(workspace, error) from error
    return path


def unwritable(workspace: Path, error: OSError) -> RlhfError:
    """The one-line message for a folder that takes no files."""
    return RlhfError(f"cannot write in {workspace} ({error.strerror}); make it writable or choose another workspace")


@contextmanager
def locked(
    workspace: Path, name: str = "lock", *, wait: bool = False, on_wait: Callable[[str], None] | None = None
) -> Iterator[int]:
    """Hold ``.rlhf/NAME`` (flock) for the block. A holder elsewhere: wait for it, or ``RlhfError`` in one line.

    The lock belongs to this process alone, and the kernel frees it when the process dies. Only a child that is handed
    the descriptor that this yields holds it too.
    """
    path = private(workspace, name)
    try:
        handle = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise unwritable(workspace, error) from error
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


SERVICES_FILE = "services.json"


def record_services(workspace: Path, api_url: str, addresses: dict[str, str]) -> None:
    """Note where the services of ``rlhf up`` listen, so that ``rlhf run`` in the same workspace uses them."""
    from rlhf_core.files import atomic_write_json

    pid = os.getpid()
    atomic_write_json(
        private(workspace, SERVICES_FILE), {"pid": pid, "birth": birth(pid), "api_url": api_url, "addresses": addresses}
    )


def running_services(workspace: Path) -> str | None:
    """The API address of a live ``rlhf up`` of this workspace, or None."""
    try:
        record = json.loads((workspace / PRIVATE / SERVICES_FILE).read_text(encoding="utf-8"))
        alive = is_alive(int(record["pid"]), record["birth"])
        return str(record["api_url"]) if alive else None
    except (OSError, ValueError, KeyError):
        return None


def forget_services(workspace: Path) -> None:
    """Remove the note of ``record_services``."""
    (workspace / PRIVATE / SERVICES_FILE).unlink(missing_ok=True)
