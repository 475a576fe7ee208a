"""Files of a workspace as they were at a revision of git."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from flows.dvc_repo.root import git_output
from flows.supervision.processes import run_module
from rlhf_core.errors import RlhfError


def commit_of(workspace: Path, revision: str) -> str:
    """Return the commit that a revision of git names in ``workspace``.

    Raises:
        RlhfError: There is no such revision, or the workspace is not in a git repository.
    """
    commit = git_output(
        workspace, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}"
    )
    if commit is None:
        raise RlhfError(f"{revision} is neither a data file nor a revision of git in {workspace}")
    return commit


def repository_of(workspace: Path) -> Path:
    """Return the folder of the git repository that ``workspace`` lies in."""
    top = git_output(workspace, "rev-parse", "--show-toplevel")
    if top is None:
        raise RlhfError(
            f"{workspace} is in no git repository, so there are no revisions to compare"
        )
    return Path(top)


def check_out(workspace: Path, revision: str, paths: Sequence[str], target: Path) -> None:
    """Copy ``paths`` of ``workspace`` as they were at ``revision`` to the same under ``target``.

    Paths may lead out of the workspace, but not out of its repository; the folders above ``target``
    stand for those above the workspace then.

    Raises:
        RlhfError: One of them is not part of that revision, or its data are in no cache or remote;
            or DVC fails.
    """
    folder = workspace.resolve()
    commit, repository = commit_of(workspace, revision), repository_of(workspace).resolve()
    for path in dict.fromkeys(paths):
        file = Path(os.path.normpath(folder / path))
        copy = Path(os.path.normpath(target / path))
        if Path(path).is_absolute() or not file.is_relative_to(repository):
            raise RlhfError(
                f"cannot read the data of {revision}: {path} is not in the repository {repository}"
            )
        copy.parent.mkdir(parents=True, exist_ok=True)
        inside = file.relative_to(repository).as_posix()
        result = run_module(
            workspace, "dvc", "get", str(repository), inside, "--rev", commit, "--out", str(copy)
        )
        if result.exit_code:
            hint = "is dvc.lock, or the file, committed, and are its data in the cache or a remote?"
            raise RlhfError(f"cannot read {path} as of {revision} ({result.error_line}); {hint}")
