"""Files and folders of a workspace as they were at a git revision, from git or from the DVC cache and remotes.

DVC runs in a child process: ``python -m flows.dvc_repo.revision WORKSPACE REVISION TARGET PATH…``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from flows.supervision.processes import run_module
from rlhf_core.errors import RlhfError


def commit_of(workspace: Path, revision: str) -> str:
    """Return the commit that a revision of git names in ``workspace``.

    Raises:
        RlhfError: There is no such revision, or the workspace is not in a git repository.
    """
    done = _rev_parse(workspace, "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    if done.returncode:
        raise RlhfError(f"{revision} is neither a data file nor a revision of git in {workspace}")
    return done.stdout.strip()


def repository_of(workspace: Path) -> Path:
    """Return the folder of the git repository that ``workspace`` lies in; ``RlhfError`` if it lies in none."""
    done = _rev_parse(workspace, "--show-toplevel")
    if done.returncode:
        raise RlhfError(f"{workspace} is in no git repository, so there are no revisions to compare")
    return Path(done.stdout.removesuffix("\n"))


def _rev_parse(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(["git", "-C", str(folder), "rev-parse", *options], capture_output=True, text=True)
    except OSError as error:
        raise RlhfError("git is not installed, so there are no revisions to compare") from error


def check_out(workspace: Path, revision: str, paths: Sequence[str], target: Path) -> None:
    """Copy ``paths`` (relative to ``workspace``) as they were at ``revision`` to the same paths under ``target``.

    Paths may lead out of the workspace, but not out of its repository; the folders above ``target`` stand for those
    above the workspace then.

    Raises:
        RlhfError: One of them is not part of that revision, or its data are in no cache or remote; or DVC fails.
    """
    result = run_module(
        workspace, "flows.dvc_repo.revision", str(workspace), commit_of(workspace, revision), str(target), *paths
    )
    if result.exit_code:
        raise RlhfError(f"cannot read the data of {revision}: {result.error_line}")


def main(workspace: str, commit: str, target: str, *paths: str) -> int:
    """Copy the paths with DVC, which is imported here; if it fails, print one line to stderr and return 1."""
    try:
        from dvc.api import DVCFileSystem

        folder = Path(workspace).resolve()
        repository = repository_of(folder).resolve()
        files = DVCFileSystem(str(repository), rev=commit, subrepos=True)  # with what git alone tracks
        for path in paths:
            file, copy = Path(os.path.normpath(folder / path)), Path(os.path.normpath(Path(target) / path))
            if Path(path).is_absolute() or not file.is_relative_to(repository):
                raise FileNotFoundError(f"{path} is not in the repository {repository}")
            inside = f"/{file.relative_to(repository).as_posix()}"
            if not files.exists(inside):
                raise FileNotFoundError(f"{path} is no part of it (is dvc.lock, or the file, committed?)")
            copy.parent.mkdir(parents=True, exist_ok=True)
            files.get(inside, str(copy), recursive=True)
    except Exception as error:  # DVC's exceptions have no common base class in its public interface
        sys.stderr.write(f"{' '.join(str(error).split()) or type(error).__name__}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
