"""What a workspace last registered, kept in ``.rlhf/registered.json`` for commands that ask no registry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.dvc_repo.lock_file import recorded_hash
from flows.workspace.folder import PRIVATE, private_path
from rlhf_core.errors import DataError
from rlhf_core.storage.files import atomic_write_json, read_json

FILE = "registered.json"


@dataclass(frozen=True)
class RegisteredHere:
    """The version that holds a model folder of the workspace; ``ungated`` says why no gate vouches for it."""

    model: str
    version: str
    ungated: str = ""


def write_registered(workspace: Path, versions: Mapping[str, RegisteredHere]) -> None:
    """Record the version of each model folder, with the hash that dvc.lock has for the folder."""
    atomic_write_json(
        private_path(workspace, FILE),
        {
            folder: {
                "model": entry.model,
                "version": entry.version,
                "ungated": entry.ungated,
                "dvc": recorded_hash(workspace, folder),
            }
            for folder, entry in versions.items()
        },
    )


def read_registered(workspace: Path, folder: str) -> RegisteredHere | None:
    """Return the version that was made of ``folder`` as dvc.lock records it now; None if there is none."""
    try:
        entry: Mapping[str, Any] | None = read_json(workspace / PRIVATE / FILE).get(folder)
    except DataError:
        return None
    if entry is None or entry["dvc"] is None or entry["dvc"] != recorded_hash(workspace, folder):
        return None
    return RegisteredHere(entry["model"], entry["version"], entry["ungated"])
