"""Make a workspace a DVC root, and find the cache it uses."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from flows.supervision.environment import child_environment
from flows.workspace.folder import cannot_write
from rlhf_core.errors import RlhfError


def ensure_dvc(workspace: Path, cache: Path | None = None) -> None:
    """Make the folder a DVC root unless it is one: inside git where git tracks it, else without. No telemetry."""
    if (workspace / ".dvc" / "config").is_file():
        return
    try:
        shutil.rmtree(workspace / ".dvc", ignore_errors=True)
        _dvc(workspace, "init", "--quiet", *_scm_options(workspace))
        _dvc(workspace, "config", "core.analytics", "false")
        _dvc(workspace, "config", "core.check_update", "false")
        if cache is not None:
            _dvc(workspace, "cache", "dir", "--local", str(cache.resolve()))
    except OSError as error:
        raise cannot_write(workspace, error) from error


def cache_of(workspace: Path) -> Path:
    """The DVC cache folder that a workspace uses."""
    answer = _dvc(workspace, "cache", "dir")
    return (workspace / answer.strip()).resolve()


def _scm_options(workspace: Path) -> list[str]:
    """Inside git, but not where git ignores the folder: DVC refuses a pipeline file that git ignores."""
    if shutil.which("git") is None:
        return ["--no-scm"]
    top = _git(workspace, "rev-parse", "--show-toplevel")
    if top is None or _git(workspace, "check-ignore", "-q", str(workspace)) is not None:
        return ["--no-scm"]
    return [] if Path(top).resolve() == workspace.resolve() else ["--subdir"]


def _git(folder: Path, *arguments: str) -> str | None:
    """Output of a git command, None if it says no."""
    answer = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True)
    return answer.stdout.strip() if answer.returncode == 0 else None


def _dvc(workspace: Path, *arguments: str) -> str:
    answer = subprocess.run(
        [sys.executable, "-m", "dvc", *arguments],
        cwd=workspace,
        env=child_environment(workspace),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    if answer.returncode:
        errors = [line.removeprefix("ERROR: ") for line in answer.stderr.splitlines() if "ERROR" in line]
        reason = errors[-1] if errors else answer.stderr.strip()[-200:]
        raise RlhfError(f"dvc {' '.join(arguments)} in {workspace} failed: {reason}")
    return answer.stdout
