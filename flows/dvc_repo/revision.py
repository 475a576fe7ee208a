"""Files and folders of a workspace as they were at a git revision, from git or from the DVC cache and remotes.

DVC runs in a child process: ``python -m flows.dvc_repo.revision WORKSPACE REVISION TARGET PATH…``.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from flows.supervision.python_module import run_module
from rlhf_core.errors import RlhfError


def commit_of(workspace: Path, revision: str) -> str:
    """Return the commit that a revision of git names in ``workspace``.

    Raises:
        RlhfError: There is no such revision, or the workspace is not in a git repository.
    """
    command = ["git", "-C", str(workspace), "rev-parse", "--verify", "--quiet", "--end-of-options"]
    try:
        done = subprocess.run([*command, f"{revision}^{{commit}}"], capture_output=True, text=True)
    except OSError as error:
        raise RlhfError("git is not installed, so there are no revisions to compare") from error
    if done.returncode:
        raise RlhfError(f"{revision} is neither a data file nor a revision of git in {workspace}")
    return done.stdout.strip()


def check_out(workspace: Path, revision: str, paths: Sequence[str], target: Path) -> None:
    """Copy ``paths`` (relative to ``workspace``) as they were at ``revision`` to the same paths under ``target``.

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
        from dvc.repo import Repo
        from dvc.repo.brancher import switch

        with Repo(workspace) as repo:
            root = Path(repo.root_dir).resolve()  # within the revision it is a path of git's
            with switch(repo, commit):
                for path in paths:
                    inside = f"/{(Path(workspace).resolve() / path).relative_to(root).as_posix()}"
                    if not repo.dvcfs.exists(inside):
                        raise FileNotFoundError(f"{path} is no part of it (is dvc.lock, or the file, committed?)")
                    (Path(target) / path).parent.mkdir(parents=True, exist_ok=True)
                    repo.dvcfs.get(inside, str(Path(target) / path), recursive=True)
    except Exception as error:  # DVC's exceptions have no common base class in its public interface
        sys.stderr.write(f"{' '.join(str(error).split()) or type(error).__name__}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
