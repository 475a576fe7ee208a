"""What a model was made from, and the proof that its gate judged these very files."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.asking import ask
from rlhf_core.config.load import PARAMS_FILE
from rlhf_core.config.yaml_text import plain, read
from rlhf_core.errors import GateFailed, RlhfError
from rlhf_core.files import read_json, sha256_file

NO_REVISION = "none"


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


def git_revision(workspace: Path) -> str:
    """The commit that the workspace lies in, with "-dirty" where tracked files differ; "none" without one."""
    try:
        commit = _git(workspace, "rev-parse", "HEAD")
        changed = _git(workspace, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return NO_REVISION
    return f"{commit}-dirty" if changed else commit


def _git(workspace: Path, *arguments: str) -> str:
    answer = subprocess.run(
        ["git", *arguments], cwd=workspace, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL
    )
    return answer.stdout.strip()


def recorded_hash(workspace: Path, path: str) -> str | None:
    """The hash that dvc.lock records for the out ``path``, or None."""
    return recorded_hashes(workspace).get(path)


def recorded_hashes(workspace: Path) -> dict[str, str]:
    """The hashes that dvc.lock records, by the path of the out; none before the first stage has run."""
    lock = workspace / "dvc.lock"
    stages = (plain(read(lock)) if lock.is_file() else {}).get("stages") or {}
    outs = (out for stage in stages.values() for out in stage.get("outs") or [])
    return {out["path"]: str(out["md5"]) for out in outs if "md5" in out}


def dvc_status(workspace: Path, stages: Sequence[str] = ()) -> dict[str, Any]:
    """``dvc status`` as ``{stage: [what changed, …]}``, empty when all is up to date; ``RlhfError`` if DVC fails."""
    printed, complaint = ask(workspace, "-m", "dvc", "status", "--json", *stages)
    if complaint:
        raise RlhfError(f"dvc status failed in {workspace}: {complaint}")
    status: dict[str, Any] = json.loads(printed or "{}")
    return status


def describe_changes(changes: Any) -> str:
    """``models/policy modified, metrics/ppo.json deleted`` out of one stage's entry of ``dvc status``."""
    found = []
    for change in changes:
        if not isinstance(change, dict):
            found.append(str(change))
            continue
        for what in change.values():
            items = what.items() if isinstance(what, dict) else [(str(what), "")]
            for path, state in items:
                if isinstance(state, dict):
                    found += [f"{path}:{key} {word}" for key, word in state.items()]
                else:
                    found.append(f"{path} {state}".strip())
    return ", ".join(found)


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
