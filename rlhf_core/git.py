"""The git revision of a folder."""

from __future__ import annotations

import subprocess
from pathlib import Path

NO_REVISION = "none"


def git_revision(folder: Path) -> str:
    """Return the commit that ``folder`` is at, with "-dirty" where tracked files differ; "none" outside git."""
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return NO_REVISION
    return f"{commit}-dirty" if changes else commit


def _git(folder: Path, *arguments: str) -> str:
    process = subprocess.run(
        ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL
    )
    return process.stdout.strip()
