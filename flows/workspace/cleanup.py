"""Cleanup of what a dead run left in a workspace: processes, stale DVC locks, the record of its services."""

from __future__ import annotations

from pathlib import Path

from flows.supervision.processes import kill_leftover_processes
from flows.workspace.dvc_locks import release_dvc_locks
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
