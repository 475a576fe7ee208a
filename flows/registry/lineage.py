"""What a model was made from, and the proof that its gate judged these very files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.dvc_repo.lock_file import recorded_hash
from flows.dvc_repo.status import describe_changes, dvc_status
from flows.workspace.git import git_revision
from rlhf_core.config.loading.load import PARAMS_FILE
from rlhf_core.errors import GateFailed, RlhfError
from rlhf_core.files import read_json, sha256_file


@dataclass(frozen=True)
class Lineage:
    """Hashes that lead back from a model to what made it. ``git_revision`` is "none" outside a repository and ends in
    "-dirty" where tracked files differ from the commit; ``data`` is DVC's hash of the clean data."""

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


def passing_gate(workspace: Path, gate: str) -> dict[str, Any]:
    """The evidence of a gate that passed and whose hashes match the files it judged.

    Raises :class:`GateFailed` when there is no evidence, a condition failed (also in report mode, which lets the
    pipeline go on but vouches for nothing), or a judged file has changed since.
    """
    path = workspace / "gates" / f"{gate}.json"
    if not path.is_file():
        raise GateFailed(
            f"gates/{gate}.json does not exist: the {gate} gate has not judged this workspace; run `rlhf run`"
        )
    report: dict[str, Any] = read_json(path)
    failed = [c["metric"] for c in report.get("conditions", []) if c.get("passed") is not True]
    if report.get("passed") is not True or failed:
        mode = " (it only reports, mode: report)" if report.get("mode") == "report" else ""
        raise GateFailed(f"the {gate} gate did not pass{mode}: {', '.join(failed) or 'see ' + str(path)}")
    evidence = report.get("evidence") or {}
    if not evidence:
        raise GateFailed(f"gates/{gate}.json names no evidence, so it cannot vouch for a model; run `rlhf run` again")
    for name, expected in evidence.items():
        file = workspace / name
        if not file.is_file() or sha256_file(file) != expected:
            raise GateFailed(f"{name} is not the file that the {gate} gate judged; run `rlhf run` to judge it anew")
    return report


def require_up_to_date(workspace: Path, stages: Sequence[str]) -> None:
    """``GateFailed`` unless DVC finds the stages' files exactly as dvc.lock records them."""
    stale = dvc_status(workspace, stages)
    if stale:
        details = "; ".join(f"{stage}: {describe_changes(changes)}" for stage, changes in stale.items())
        raise GateFailed(
            f"the files are not what dvc.lock records ({details}); run `rlhf run` to bring them up to date"
        )
