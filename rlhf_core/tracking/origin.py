"""Of which workspace and commit a run in MLflow is, and who started it by which command."""

from __future__ import annotations

import getpass
import os
from pathlib import Path
from uuid import uuid4

from rlhf_core import __version__
from rlhf_core.config.loading import PARAMS_FILE
from rlhf_core.errors import cannot_write
from rlhf_core.git import (
    NO_REVISION,
    branch_at,
    changed_files,
    git_branch,
    git_remote,
    git_revision,
    package_revision,
)
from rlhf_core.storage.files import atomic_write_text
from rlhf_core.tracking.delivery import address
from rlhf_core.tracking.pipeline_run import DVC_BASELINE, WORKSPACE_ID_TAG, current_experiment

PACKAGE_VERSION_TAG, PACKAGE_COMMIT_TAG = "rlhf.package_version", "rlhf.package_commit"
COMMIT_TAG, BRANCH_TAG, REPOSITORY_TAG = (
    "mlflow.source.git.commit",
    "mlflow.source.git.branch",
    "mlflow.source.git.repoURL",
)
CHANGED_TAG = "rlhf.changed_files"  # the tracked files that differ from the commit
LOCK_FILE = "dvc.lock"
MOST_TEXT = 500
ID_FILE = Path(".rlhf") / "workspace_id"


def record_folder(workspace: Path) -> Path:
    """Return the workspace whose MLflow records ``workspace``: itself, or that of a trial.

    A trial of `rlhf run --set` lies in ``workspaces/`` of its base, one of `dvc exp run --temp` or
    `--queue` in a folder under ``.dvc/tmp``, for which DVC names the base in ``DVC_ROOT``. Trials
    are compared in one place, and stay there when their folder goes.
    """
    folder = workspace.resolve()
    base = folder.parent.parent
    if (
        folder.parent.name == "workspaces"
        and (base / "params.yaml").is_file()
        and (base / "dvc.yaml").is_file()
    ):
        return base
    dvc_root = os.environ.get("DVC_ROOT")
    if dvc_root and folder.is_relative_to(Path(dvc_root).resolve() / ".dvc" / "tmp"):
        root = next(
            (parent for parent in (folder, *folder.parents) if (parent / ".dvc").is_dir()), folder
        )
        return record_folder(Path(dvc_root).resolve() / folder.relative_to(root))
    return folder


def workspace_id(workspace: Path) -> str:
    """Return the id of a workspace, made on first use and kept in ``.rlhf/workspace_id``.

    The file also has the folder in which the workspace was. A workspace that was moved keeps its
    id. A copy whose original is still there gets one of its own, as a clone or a trial does: else
    both would own the same registered models.
    """
    try:
        path = workspace / ID_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        known, folder = _read_id(workspace)
        own_address = str(workspace.resolve())
        if known is None or folder != own_address:
            copied = folder is not None and _read_id(Path(folder))[0] == known
            if known is None or copied:
                known = uuid4().hex
            atomic_write_text(path, f"{known}\n{own_address}\n")
        return known
    except OSError as error:
        raise cannot_write(workspace, error) from error


def known_workspace_id(workspace: Path) -> str | None:
    """Return the id of a workspace, None before its first use."""
    return _read_id(workspace)[0]


def _read_id(workspace: Path) -> tuple[str | None, str | None]:
    path = workspace / ID_FILE
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    known, folder, *_ = [*text.splitlines(), "", ""]
    return known.strip() or None, folder or None


def workspace_tags(workspace: Path) -> dict[str, str]:
    """Say which workspace the run of a pipeline is of, by its name and its id.

    That of a DVC experiment is the one that it was started in: folders that DVC makes for an
    experiment have names of chance, and go.
    """
    own = record_folder(workspace) if current_experiment() else workspace.resolve()
    return {
        "workspace": own.name,
        "rlhf.workspace": own.name,
        WORKSPACE_ID_TAG: workspace_id(own),
    }


def user_name() -> str:
    """The name of the user who runs this process; the id where it has no name, as in containers."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return str(os.getuid())


def recorded_revision(workspace: Path) -> str:
    """Return the commit of a workspace, with "-dirty" where what a run reads differs from it.

    The lock is what runs write. In a DVC experiment so are the parameters: they are what is tried,
    and every run has them in full.
    """
    written = {LOCK_FILE, PARAMS_FILE} if current_experiment() else {LOCK_FILE}
    return git_revision(workspace, written)


def origin_tags(workspace: Path, command: str) -> dict[str, str]:
    """Say who started a run or made a model, by which command and of which commit.

    MLflow's pages show these tags.

    Commit, branch and repository are those of the workspace. The package, which may come from
    another repository, has tags of its own. A DVC experiment is committed after its last stage: the
    commit here is the one that it started from, whose branch DVC leaves while it runs.
    """
    user = os.environ.get("RLHF_ACTOR") or user_name()
    tags = {"mlflow.user": user, "mlflow.source.name": command, "mlflow.source.type": "LOCAL"}
    tags[PACKAGE_VERSION_TAG] = __version__
    if (revision := package_revision()) != NO_REVISION:
        tags[PACKAGE_COMMIT_TAG] = revision
    if (revision := recorded_revision(workspace)) == NO_REVISION:
        return tags
    tags[COMMIT_TAG] = revision
    if changed := changed_files(workspace):
        tags[CHANGED_TAG] = ", ".join(changed)[:MOST_TEXT]
    branch = git_branch(workspace)
    if not branch and current_experiment():
        branch = branch_at(record_folder(workspace), os.environ.get(DVC_BASELINE, ""))
    if branch:
        tags[BRANCH_TAG] = branch
    if remote := git_remote(workspace):
        tags[REPOSITORY_TAG] = address(remote)
    return tags
