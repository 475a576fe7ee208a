"""Hashes that lead back from a model to the code, data and parameters that made it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flows.dvc_repo.lock_file import recorded_hash
from rlhf_core.config.loading.load import PARAMS_FILE
from rlhf_core.errors import RlhfError
from rlhf_core.git import git_revision
from rlhf_core.storage.files import sha256_file


@dataclass(frozen=True)
class Lineage:
    """Where a model comes from.

    ``git_revision`` is "none" outside a repository and ends in "-dirty" where tracked files differ from the commit;
    ``data`` is DVC's hash of the clean data.
    """

    workspace: str
    git_revision: str
    dvc_lock: str
    data: str
    params: str

    def tags(self) -> dict[str, str]:
        """The lineage as tags of a model version."""
        return {
            "lineage.workspace": self.workspace,
            "lineage.git_revision": self.git_revision,
            "lineage.dvc_lock_sha256": self.dvc_lock,
            "lineage.data": self.data,
            "lineage.params_sha256": self.params,
        }


def collect_lineage(workspace: Path) -> Lineage:
    """Read the lineage of a workspace; ``RlhfError`` before its first complete run (no dvc.lock)."""
    lock = workspace / "dvc.lock"
    if not lock.is_file():
        raise RlhfError(f"{lock} does not exist, so nothing says what made the models; run `rlhf run` first")
    return Lineage(
        workspace=workspace.resolve().name,
        git_revision=git_revision(workspace),
        dvc_lock=sha256_file(lock),
        data=recorded_hash(workspace, "data/clean") or "unknown",
        params=sha256_file(workspace / PARAMS_FILE),
    )
