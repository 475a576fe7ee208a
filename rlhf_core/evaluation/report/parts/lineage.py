"""What the report is of: data, settings, code and machine."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rlhf_core.config import yaml_text
from rlhf_core.errors import RlhfError
from rlhf_core.git import git_revision
from rlhf_core.storage.files import sha256_file
from rlhf_core.tracking import PARENT_RUN_VARIABLE

LOCK = "dvc.lock"


@dataclass(frozen=True)
class ReportLineage:
    """What led to a report.

    Attributes:
        git_revision: The workspace's commit, which ends in "-dirty" where tracked files differ; "none" outside git.
        mlflow_run: Id of the run of the pipeline, else of the stage; empty without tracking.
        dvc_lock: sha256 of dvc.lock when the report was made; empty without one.
        outputs: Hash by path of what the stages wrote, as dvc.lock has it.
    """

    git_revision: str = "none"
    mlflow_run: str = ""
    dvc_lock: str = ""
    outputs: dict[str, str] = field(default_factory=dict)


def report_lineage(workspace: Path, own_run: str) -> ReportLineage:
    """Read the lineage of a workspace.

    Args:
        workspace: The folder with params.yaml.
        own_run: MLflow's id of the stage's own run, if it has one.
    """
    run = os.environ.get(PARENT_RUN_VARIABLE) or own_run
    lock = workspace / LOCK
    if not lock.is_file():
        return ReportLineage(git_revision(workspace), run)
    return ReportLineage(git_revision(workspace), run, sha256_file(lock), recorded_outputs(lock))


def recorded_outputs(lock: Path) -> dict[str, str]:
    """Return the hash of every output in dvc.lock by path, those of the report left out; empty if it is unreadable."""
    try:
        stages = yaml_text.plain(yaml_text.read(lock)).get("stages") or {}
    except RlhfError:
        return {}
    return {
        str(out["path"]): str(out.get("md5", ""))
        for name, stage in sorted(stages.items())
        if name != "report"
        for out in stage.get("outs") or []
    }


LIBRARIES = ("rlhf-pipeline", "torch", "transformers", "datasets", "peft", "numpy", "scikit-learn")


def package_versions() -> dict[str, str]:
    """Return the version of Python and of each installed library, by name."""
    versions = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
