"""DVC's locks in a workspace, which processes that were killed leave behind.

``python -m flows.workspace.dvc_locks WORKSPACE`` removes a table of locks that DVC cannot read. It leaves the locks of
other processes alone, which may run on another host. The caller holds the workspace's lock.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from flows.supervision.processes import start_token


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
        return remove_broken_rwlock(path.parent)
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


def remove_broken_rwlock(folder: Path) -> int:
    """Remove DVC's table of locks if it is no JSON, since DVC refuses every command until it is gone.

    DVC writes it in place, so that one that is killed then leaves it empty.

    Returns:
        1 if it was removed, else 0.
    """
    path = folder / "rwlock"
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        return 0
    except ValueError:
        path.unlink(missing_ok=True)
        return 1
    return 0


if __name__ == "__main__":
    remove_broken_rwlock(Path(sys.argv[1]) / ".dvc" / "tmp")
