"""A workspace is a folder with params.yaml and dvc.yaml: finding one, and the paths inside its private folder."""

from __future__ import annotations

import os
from pathlib import Path

from rlhf_core.errors import RlhfError

PRIVATE = ".rlhf"


def find_workspace(given: Path | None = None) -> Path:
    """The absolute path of ``given``, or of the nearest folder upward that is a workspace; ``RlhfError`` if none is."""
    if given is not None:
        if not is_workspace(given):
            raise RlhfError(f"{given} is no workspace (params.yaml and dvc.yaml); make one with: rlhf init {given}")
        return given.resolve()
    here = Path.cwd().resolve()
    for folder in (here, *here.parents):
        if is_workspace(folder):
            return folder
    raise RlhfError(f"no workspace at or above {here}; make one with `rlhf init DIR`, or name one with --workspace DIR")


def is_workspace(folder: Path) -> bool:
    """Whether ``folder`` holds params.yaml and dvc.yaml."""
    return (folder / "params.yaml").is_file() and (folder / "dvc.yaml").is_file()


def private_path(workspace: Path, *parts: str) -> Path:
    """A path under the workspace's own ``.rlhf`` folder, which is created; ``RlhfError`` if that cannot be."""
    path = workspace.joinpath(PRIVATE, *parts)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(workspace, error) from error
    return path


def cannot_write(workspace: Path, error: OSError) -> RlhfError:
    """The one-line message for a folder that takes no files."""
    return RlhfError(f"cannot write in {workspace} ({error.strerror}); make it writable or choose another workspace")


def show_path(path: Path) -> str:
    """A path as a person would type it from here."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("../..") else relative
