"""Cleanup of what a dead run left in a workspace: processes, stale DVC locks, the record of its services."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from flows.supervision.processes import kill_leftover_processes, start_token
from flows.workspace.services_file import forget_services, running_services


def cleanup(workspace: Path) -> list[str]:
    """Kill leftover processes and release the locks of dead ones. The caller holds the workspace's lock.

    Returns:
        One line for each kind of thing that was cleaned up.
    """
    report = []
    killed = kill_leftover_processes(workspace)
    if killed:
        report.append(f"killed {killed} process{'es' if killed > 1 else ''} of an earlier run")
    released = release_dvc_locks(workspace / ".dvc" / "tmp")
    if released:
        report.append(f"released {released} stale DVC lock{'s' if released > 1 else ''}")
    if running_services(workspace) is None:
        forget_services(workspace)
    return report


def release_dvc_locks(folder: Path) -> int:
    """Release the locks in DVC's folder for temporary files whose holders are dead.

    These are entries of the file ``rwlock``, and the file ``lock`` as a whole.

    Returns:
        How many locks were released.
    """
    released = _release_rwlock(folder / "rwlock")
    lock = folder / "lock"
    try:
        holder = lock.read_text(encoding="utf-8").strip()
    except OSError:
        return released
    if holder.isdigit() and start_token(int(holder)) is None:
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
    write = {file: holder for file, holder in table.get("write", {}).items() if _is_live_dvc(holder)}
    read = {file: [h for h in holders if _is_live_dvc(h)] for file, holders in table.get("read", {}).items()}
    read = {file: holders for file, holders in read.items() if holders}
    before = len(table.get("write", {})) + sum(len(holders) for holders in table.get("read", {}).values())
    released = before - len(write) - sum(len(holders) for holders in read.values())
    if released:
        temporary = path.with_name(f".rwlock.{os.getpid()}")
        temporary.write_text(json.dumps({"write": write, "read": read}), encoding="utf-8")
        temporary.replace(path)
    return released


def _is_live_dvc(holder: dict[str, Any]) -> bool:
    """Whether the holder of a lock still runs; a pid that another program has taken since does not count."""
    pid = int(holder.get("pid", 0))
    if start_token(pid) is None:
        return False
    try:
        return b"dvc" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True
