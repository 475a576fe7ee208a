"""The record of the services of a workspace, and the cleanup of what a dead run left in it.

``python -m flows.workspace.cleanup WORKSPACE`` does the cleanup for a command that holds the workspace's lock.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flows.supervision.processes import start_token
from flows.workspace.folder import PRIVATE, private_path
from rlhf_core.storage.files import atomic_write_json

SERVICES_FILE = "services.json"


def record_services(workspace: Path, api_url: str, addresses: dict[str, str]) -> None:
    """Record that this process runs a Prefect server at ``api_url``, and user interfaces at ``addresses``."""
    pid = os.getpid()
    record = {"pid": pid, "start_token": start_token(pid), "api_url": api_url, "addresses": addresses}
    atomic_write_json(private_path(workspace, SERVICES_FILE), record)


def running_services(workspace: Path) -> str | None:
    """Return the Prefect API address of the live ``rlhf up`` of this workspace, None if there is none."""
    record = _live_record(workspace)
    return str(record["api_url"]) if record else None


def running_addresses(workspace: Path) -> Mapping[str, str]:
    """Return the addresses of the user interfaces of the live ``rlhf up``, by name; empty if there is none."""
    record = _live_record(workspace)
    return dict(record.get("addresses", {})) if record else {}


def _live_record(workspace: Path) -> Mapping[str, Any] | None:
    """Return the record of a process that still runs, else None."""
    try:
        record: Mapping[str, Any] = json.loads((workspace / PRIVATE / SERVICES_FILE).read_text(encoding="utf-8"))
        alive = start_token(int(record["pid"])) == record["start_token"]
    except (OSError, ValueError, KeyError):
        return None
    return record if alive else None


def forget_services(workspace: Path) -> None:
    """Remove the record made by :func:`record_services`."""
    (workspace / PRIVATE / SERVICES_FILE).unlink(missing_ok=True)


def cleanup(workspace: Path) -> list[str]:
    """Remove what DVC and ``rlhf up`` could not, and return a line on each. The caller holds the workspace's lock.

    DVC takes over the locks of dead processes itself, but refuses every command while ``.dvc/tmp/rwlock`` is no JSON.
    It writes that file in place, so that a DVC that is killed may leave it empty.
    """
    report = []
    locks = workspace / ".dvc" / "tmp" / "rwlock"
    try:
        json.loads(locks.read_text(encoding="utf-8"))
    except OSError:
        pass
    except ValueError:
        locks.unlink(missing_ok=True)
        report.append("removed DVC's table of locks, which a killed DVC had left empty")
    if running_services(workspace) is None:
        forget_services(workspace)
    return report


if __name__ == "__main__":
    cleanup(Path(sys.argv[1]))
