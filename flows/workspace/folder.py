"""Workspace folders: finding one, the paths of its private files, and the names of it and its runs."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from rlhf_core.errors import ModelError, RlhfError

PRIVATE = ".rlhf"


def find_workspace(folder: Path | None = None) -> Path:
    """Return the absolute path of the workspace ``folder``, by default the nearest one at or above the current folder.

    Raises:
        RlhfError: ``folder`` is not a workspace, or there is none at or above the current folder.
    """
    if folder is not None:
        if not is_workspace(folder):
            raise RlhfError(
                f"{folder} is not a workspace (it has no params.yaml and dvc.yaml); make one with: "
                f"rlhf init {shlex.quote(str(folder))}"
            )
        return folder.resolve()
    current = Path.cwd().resolve()
    for candidate in (current, *current.parents):
        if is_workspace(candidate):
            return candidate
    raise RlhfError(
        f"there is no workspace at or above {current}; make one with `rlhf init DIR`, or name one with --workspace DIR"
    )


def is_workspace(folder: Path) -> bool:
    """Whether ``folder`` holds params.yaml and dvc.yaml."""
    return (folder / "params.yaml").is_file() and (folder / "dvc.yaml").is_file()


def private_path(workspace: Path, *parts: str) -> Path:
    """Return a path under the workspace's own ``.rlhf`` folder, whose parent folder is created.

    Raises:
        RlhfError: the workspace cannot be written to.
    """
    path = workspace.joinpath(PRIVATE, *parts)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(workspace, error) from error
    return path


def cannot_write(folder: Path, error: OSError) -> RlhfError:
    """Return the one-line error for a folder that cannot be written to."""
    return RlhfError(f"cannot write to {folder} ({error.strerror}); make it writable or choose another workspace")


def display_path(path: Path) -> str:
    """Return a path as a person would type it in the current folder."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("../..") else relative


def require_model_folder(path: Path) -> None:
    """Raise :class:`ModelError` where ``path`` is no model folder."""
    if not (path / "config.json").is_file():
        adapter = ", only an adapter, to be merged into its model" if (path / "adapter_config.json").is_file() else ""
        raise ModelError(
            f"no model at {path} (it has no config.json{adapter}); name a model folder such as models/sft, or none "
            "to talk to the champion"
        )


SEPARATOR = " · "


def workspace_slug(workspace: Path) -> str:
    """Return the name of the workspace as names on a server carry it: lowercase letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", workspace.resolve().name.lower()).strip("-") or "workspace"


def run_label(workspace: Path, profile: str, started: datetime) -> str:
    """Return ``WORKSPACE · PROFILE · TIME``; the profile is left out where it is unknown or the workspace's name."""
    name = workspace.resolve().name
    parts = [name, profile if profile != name else "", f"{started:%Y-%m-%d %H:%M:%S}"]
    return SEPARATOR.join(part for part in parts if part)


def job_label(workspace: str, stage: str) -> str:
    """Return the name of a flow run that computes one stage: ``WORKSPACE · STAGE``."""
    return SEPARATOR.join([Path(workspace).name, stage])


def run_tags(workspace: Path, profile: str) -> Mapping[str, str]:
    """Return what a person looks for a run by."""
    return {"workspace": workspace.resolve().name} | ({"profile": profile} if profile else {})
