"""What a dead run left in a workspace: processes, DVC locks, notes. Call with the workspace's lock held."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from flows.supervision.processes import birth, kill_leftover_processes
from flows.workspace.folder import PRIVATE
from flows.workspace.services_file import SERVICES_FILE, running_services


def cleanup(workspace: Path) -> list[str]:
    """End leftover processes and drop locks of dead ones. Returns one line per thing that was found."""
    found = []
    ended = kill_leftover_processes(workspace)
    if ended:
        found.append(f"ended {ended} process{'es' if ended > 1 else ''} of an earlier run")
    released = release_dvc_locks(workspace / ".dvc" / "tmp")
    if released:
        found.append(f"released {released} stale DVC lock{'s' if released > 1 else ''}")
    if running_services(workspace) is None:
        (workspace / PRIVATE / SERVICES_FILE).unlink(missing_ok=True)
    return found


def release_dvc_locks(folder: Path) -> int:
    """Drop the entries of dead processes from DVC's ``rwlock``, and ``lock`` if its owner is gone. Returns how many."""
    released = _release_rwlock(folder / "rwlock")
    lock = folder / "lock"
    pid = _pid_in(lock)
    if pid is not None and birth(pid) is None:
        lock.unlink(missing_ok=True)
        released += 1
    return released


def _release_rwlock(path: Path) -> int:
    try:
        table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        return 0
    except ValueError:
        path.unlink(missing_ok=True)
        return 1
    write = {place: info for place, info in table.get("write", {}).items() if _lives(info)}
    read = {place: [i for i in infos if _lives(i)] for place, infos in table.get("read", {}).items()}
    read = {place: infos for place, infos in read.items() if infos}
    before = len(table.get("write", {})) + sum(len(infos) for infos in table.get("read", {}).values())
    dropped = before - len(write) - sum(len(infos) for infos in read.values())
    if dropped:
        temporary = path.with_name(f".rwlock.{os.getpid()}")
        temporary.write_text(json.dumps({"write": write, "read": read}), encoding="utf-8")
        temporary.replace(path)
    return dropped


def _lives(info: dict[str, Any]) -> bool:
    """Whether the holder is a live DVC: a pid that was reused by something else does not hold a lock."""
    pid = int(info.get("pid", 0))
    if birth(pid) is None:
        return False
    try:
        return b"dvc" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True


def _pid_in(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
