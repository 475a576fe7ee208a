"""The git revision of a folder, where it comes from, and the revision of this package."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Collection
from functools import cache
from pathlib import Path

NO_REVISION = "none"


def git_revision(folder: Path, besides: Collection[str] = ()) -> str:
    """Return the commit that ``folder`` is at, with "-dirty" where tracked files differ; "none"
    outside git.

    Args:
        besides: Files of the folder whose differences do not count.
    """
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        changed = changed_files(folder)
    except (OSError, subprocess.CalledProcessError):
        return NO_REVISION
    return commit if set(changed) <= set(besides) else f"{commit}-dirty"


def changed_files(folder: Path) -> list[str]:
    """Return the tracked files that differ from the commit, relative to ``folder``.

    Raises:
        subprocess.CalledProcessError: The folder is not in a repository, or that has no commit.
        OSError: There is no git.
    """
    listed = _git(folder, "diff", "--name-only", "--no-renames", "-z", "HEAD")
    below = _git(folder, "rev-parse", "--show-prefix") or "."
    return [os.path.relpath(name, below) for name in listed.split("\0") if name]


def git_branch(folder: Path) -> str:
    """Return the branch that ``folder`` is on; empty outside git and between branches."""
    try:
        return _git(folder, "symbolic-ref", "--short", "--quiet", "HEAD")
    except (OSError, subprocess.CalledProcessError):
        return ""


def branch_at(folder: Path, commit: str) -> str:
    """Return the branch that ends in ``commit``: the present one of ``folder``, else the only one.

    Empty where there are none or several.
    """
    try:
        own = f"--points-at={commit}"
        names = _git(folder, "for-each-ref", own, "--format=%(refname:short)", "refs/heads").split()
    except (OSError, subprocess.CalledProcessError):
        return ""
    present = git_branch(folder)
    if present in names:
        return present
    return names[0] if len(names) == 1 else ""


def git_remote(folder: Path) -> str:
    """Return the address of the repository's remote, ``origin`` among several; empty where there is
    none.

    It may hold a user name and a password.
    """
    try:
        names = _git(folder, "remote").split()
        if not names:
            return ""
        remote = "origin" if "origin" in names else names[0]
        return _git(folder, "remote", "get-url", remote)
    except (OSError, subprocess.CalledProcessError):
        return ""


@cache
def package_revision() -> str:
    """Return the commit of the repository that tracks this package, as :func:`git_revision`; "none"
    where none does.

    An installed package may lie in a repository that ignores it, such as that of a workspace with
    its ``.venv``.
    """
    own = Path(__file__)
    try:
        _git(own.parent, "ls-files", "--error-unmatch", own.name)
    except (OSError, subprocess.CalledProcessError):
        return NO_REVISION
    return git_revision(own.parent)


def _git(folder: Path, *arguments: str) -> str:
    process = subprocess.run(
        ["git", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        stdin=subprocess.DEVNULL,
    )
    return process.stdout.strip()
