"""Who decides: the person or job by the environment, and the workspace by an id of its own."""

from __future__ import annotations

import getpass
import os
import platform
from pathlib import Path
from uuid import uuid4

from flows.registry.governance.printed_line import printed_line
from flows.workspace.folder import PRIVATE, cannot_write, private_path
from rlhf_core.storage.files import atomic_write_text

ACTOR_VARIABLE = "RLHF_ACTOR"
ID_FILE = "workspace_id"


def actor() -> str:
    """Return who acts: ``RLHF_ACTOR`` where it is set (a CI job sets it to whoever started it), else ``user@host``."""
    named = printed_line(os.environ.get(ACTOR_VARIABLE, ""))
    if named:
        return named
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a user id without a name, as in containers
        user = str(os.getuid())
    return f"{user}@{platform.node()}"


def workspace_id(workspace: Path) -> str:
    """Return the id of a workspace, made on first use and kept in ``.rlhf/workspace_id``.

    It stays the same when the folder is moved or copied; a clone or a trial has another.
    """
    path = private_path(workspace, ID_FILE)
    try:
        if not path.is_file():
            atomic_write_text(path, uuid4().hex + "\n")
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise cannot_write(workspace, error) from error


def known_workspace_id(workspace: Path) -> str | None:
    """Return the id of a workspace, None before its first use."""
    path = workspace / PRIVATE / ID_FILE
    return path.read_text(encoding="utf-8").strip() if path.is_file() else None
