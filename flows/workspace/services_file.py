"""Where the services of `rlhf up` listen, so that `rlhf run` in the same workspace uses them."""

from __future__ import annotations

import json
import os
from pathlib import Path

from flows.supervision.processes import birth, is_alive
from flows.workspace.folder import PRIVATE, private_path

SERVICES_FILE = "services.json"


def record_services(workspace: Path, api_url: str, addresses: dict[str, str]) -> None:
    """Note where the services of ``rlhf up`` listen, so that ``rlhf run`` in the same workspace uses them."""
    from rlhf_core.files import atomic_write_json

    pid = os.getpid()
    atomic_write_json(
        private_path(workspace, SERVICES_FILE),
        {"pid": pid, "birth": birth(pid), "api_url": api_url, "addresses": addresses},
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
