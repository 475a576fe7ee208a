"""The DVC root of a workspace, and the cache it uses."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from flows.supervision.python_module import run_module
from flows.workspace.folder import cannot_write
from rlhf_core.errors import RlhfError

# What ``dvc init`` writes and stages in the index of the git clone around the workspace.
INIT_FILES = (".dvc", ".dvcignore")


def ensure_dvc(workspace: Path, cache: Path | None = None) -> None:
    """Make the folder a DVC root unless it is one, within git where git tracks the folder.

    Args:
        cache: a DVC cache to share with other workspaces; by default the root gets its own.

    Raises:
        RlhfError: DVC fails, or the folder cannot be written to.
    """
    if (workspace / ".dvc" / "config").is_file():
        return
    try:
        shutil.rmtree(workspace / ".dvc", ignore_errors=True)
        staged = _staged(workspace)
        _run_dvc(workspace, "init", "--quiet", *_scm_options(workspace))
        _restage(workspace, staged)
        _write_settings(workspace / ".dvc" / "config")
        if cache is not None:
            _run_dvc(workspace, "cache", "dir", "--local", _writable_by_dvc(cache.resolve(), workspace.resolve()))
    except OSError as error:
        raise cannot_write(workspace, error) from error


def cache_of(workspace: Path) -> Path:
    """Return the DVC cache folder that a workspace uses."""
    return (workspace / _run_dvc(workspace, "cache", "dir").strip()).resolve()


def _writable_by_dvc(path: Path, workspace: Path) -> str:
    """The path, relative to the workspace where it has letters beyond ASCII, which DVC cannot write."""
    return str(path) if str(path).isascii() else os.path.relpath(path, workspace)


def _write_settings(config: Path) -> None:
    """Add settings to the file of a root just made, which has at most the section ``core``.

    ``dvc config`` does it too, in a process of a third of a second for each setting.
    """
    text = config.read_text(encoding="utf-8") or "[core]\n"
    config.write_text(f"{text}    analytics = false\n    check_update = false\n", encoding="utf-8")


def _scm_options(workspace: Path) -> list[str]:
    """Choose how ``dvc init`` relates to git; where git ignores the folder, DVC would refuse its pipeline file."""
    if shutil.which("git") is None:
        return ["--no-scm"]
    top = _git(workspace, "rev-parse", "--show-toplevel")
    if top is None or _git(workspace, "check-ignore", "-q", str(workspace)) is not None:
        return ["--no-scm"]
    return [] if Path(top).resolve() == workspace.resolve() else ["--subdir"]


def _staged(workspace: Path) -> str | None:
    """Return git's index entries of the files that ``dvc init`` stages; None outside git."""
    if shutil.which("git") is None:
        return None
    return _git(workspace, "ls-files", "--stage", "--full-name", "-z", "--", *INIT_FILES)


def _restage(workspace: Path, entries: str | None) -> None:
    """Make ``entries`` the index entries of those files again: what is committed is for the owner of the clone."""
    if entries is None or _staged(workspace) == entries:
        return
    _git(workspace, "rm", "--cached", "-r", "--quiet", "--force", "--ignore-unmatch", "--", *INIT_FILES)
    top = _git(workspace, "rev-parse", "--show-toplevel")
    if entries and top is not None:
        _git(Path(top), "update-index", "-z", "--index-info", entries=entries)


def _git(folder: Path, *arguments: str, entries: str | None = None) -> str | None:
    """Return the output of a git command that reads ``entries``, None if it fails."""
    command = ["git", "-C", str(folder), *arguments]
    process = subprocess.run(command, input=entries or "", capture_output=True, text=True)
    return process.stdout.strip() if process.returncode == 0 else None


def _run_dvc(workspace: Path, *arguments: str) -> str:
    result = run_module(workspace, "dvc", *arguments)
    if result.exit_code:
        raise RlhfError(f"dvc {' '.join(arguments)} in {workspace} failed: {result.error_line}")
    return result.stdout
