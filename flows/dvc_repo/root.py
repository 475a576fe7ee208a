"""The DVC root of a workspace, and the cache it uses."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from flows.supervision.processes import run_module
from flows.workspace.folder import cannot_write
from rlhf_core.errors import RlhfError

IGNORED = "/config.local\n/tmp\n/cache\n"  # as `dvc init` writes it within git


def ensure_dvc(workspace: Path, cache: Path | None = None) -> None:
    """Make the folder a DVC root unless it is one, within git where git tracks the folder.

    A root that was made before there was git joins it: DVC would refuse experiments in it for ever.

    Args:
        cache: a DVC cache to share with other workspaces; by default the root gets its own.

    Raises:
        RlhfError: DVC fails, or the folder cannot be written to.
    """
    folder = workspace / ".dvc"
    try:
        if not (folder / "config").is_file():
            shutil.rmtree(folder, ignore_errors=True)
            _run_dvc(workspace, "init", "--quiet", *_scm_options(workspace))
            _write_settings(folder / "config")
            if cache is not None:
                _run_dvc(workspace, "cache", "dir", "--local", _writable_by_dvc(cache.resolve(), workspace.resolve()))
        else:
            _join_git(workspace)
        if not (folder / ".gitignore").is_file():
            (folder / ".gitignore").write_text(IGNORED, encoding="utf-8")
    except OSError as error:
        raise cannot_write(workspace, error) from error


def _join_git(workspace: Path) -> None:
    """Take ``no_scm`` out of the settings where git has come to track the folder."""
    config = workspace / ".dvc" / "config"
    lines = config.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if line.partition("=")[0].strip() != "no_scm"]
    if len(kept) < len(lines) and "--no-scm" not in _scm_options(workspace):
        config.write_text("".join(kept), encoding="utf-8")


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


def _git(folder: Path, *arguments: str) -> str | None:
    """Return the output of a git command, None if it fails."""
    process = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True)
    return process.stdout.strip() if process.returncode == 0 else None


def _run_dvc(workspace: Path, *arguments: str) -> str:
    result = run_module(workspace, "dvc", *arguments)
    if result.exit_code:
        raise RlhfError(f"dvc {' '.join(arguments)} in {workspace} failed: {result.error_line}")
    return result.stdout
