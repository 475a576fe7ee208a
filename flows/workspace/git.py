"""The git revision that a folder lies in."""

from __future__ import annotations

import subprocess
from pathlib import Path

NO_REVISION = "none"


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
