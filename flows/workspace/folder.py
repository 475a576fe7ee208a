"""Workspace folders: finding one, and the paths of its private files."""

from __future__ import annotations

import os
import shlex
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
