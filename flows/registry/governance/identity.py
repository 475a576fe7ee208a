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
OWNER_TAG = "rlhf.owner"  # of a registered model


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
    """Return the id of a workspace, made on first use and kept in ``.rlhf/workspace_id`` with the folder it was in.

    A workspace that was moved keeps its id. A copy whose original is still there gets one of its own, as a clone or a
    trial does: else both would own the same registered models.
    """
    path = private_path(workspace, ID_FILE)
    try:
        known, folder = _read_id(workspace)
        here = str(workspace.resolve())
        if known is None or folder != here:
            copied = folder is not None and folder != here and _read_id(Path(folder))[0] == known
            known = uuid4().hex if known is None or copied else known
            atomic_write_text(path, f"{known}\n{here}\n")
        return known
    except OSError as error:
        raise cannot_write(workspace, error) from error


def known_workspace_id(workspace: Path) -> str | None:
    """Return the id of a workspace, None before its first use."""
    return _read_id(workspace)[0]


def _read_id(workspace: Path) -> tuple[str | None, str | None]:
    path = workspace / PRIVATE / ID_FILE
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return (lines[0].strip() or None if lines else None), (lines[1] if len(lines) > 1 else None)
