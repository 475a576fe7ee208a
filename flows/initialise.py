"""``rlhf init`` and the workspaces of trials: merged params.yaml, dvc.yaml, a DVC root, a shared cache if wanted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from flows.environment import child_environment
from flows.workspace import is_workspace, unwritable
from rlhf_core.config.load import PARAMS_FILE
from rlhf_core.config.overlay import DEFAULT_PROFILE, merge, profile_text, rebase_sources, workspace_name
from rlhf_core.config.recipe import profiles_of, recipe_folder
from rlhf_core.errors import RlhfError
from rlhf_core.files import atomic_write_text

DVC_FILE = "dvc.yaml"
TRIALS = "workspaces"
DVC_IGNORE = "# never part of a dependency or an output\n__pycache__\n*.pyc\n.rlhf\nwork\n"
GIT_IGNORE = "/.rlhf/\n/work/\n/workspaces/\n/ablation/\n/mlflow.db\n/mlartifacts/\n/report.html\n__pycache__/\n"


def initialise(
    folder: Path, profile: str | None, sets: Sequence[str], *, base: Path | None = None, cache: Path | None = None
) -> Path:
    """Make ``folder`` a workspace and return its absolute path. Everything is checked before anything is written.

    ``base`` is the workspace whose recipe is taken over (default: the project's own), ``cache`` a DVC cache to share.
    ``RlhfError`` if ``folder`` is a workspace already, or a parameter is wrong.
    """
    if is_workspace(folder):
        raise RlhfError(f"{folder} is a workspace already; edit its params.yaml, or choose another folder")
    text = recipe(base or recipe_folder(), profile, sets, folder)
    write_recipe(folder, text, base or recipe_folder())
    ensure_dvc(folder.resolve(), cache)
    return folder.resolve()


def trial_workspace(base: Path, profile: str | None, sets: Sequence[str]) -> Path:
    """The workspace of a profile and overrides under ``base/workspaces``, made or brought up to date with ``base``.

    It shares the DVC cache of ``base``, so that what is the same is not computed again.
    """
    folder = base / TRIALS / workspace_name(profile or DEFAULT_PROFILE, sets)
    text = recipe(base, profile, sets, folder)
    write_recipe(folder, text, base)
    ensure_dvc(base)
    ensure_dvc(folder, cache_of(base))
    return folder


def recipe(base: Path, profile: str | None, sets: Sequence[str], folder: Path) -> str:
    """The params.yaml text for ``folder``: that of ``base`` under a profile and ``section.key=value`` overrides.

    Relative data paths of the recipe and its profiles start at ``base``, those of ``sets`` at the current folder.
    """
    overlays = [(f"profile {profile}", profile_text(profiles_of(base), profile))] if profile else []
    text = merge((base / PARAMS_FILE).read_text(encoding="utf-8"), overlays)
    here = merge(rebase_sources(text, base.resolve(), Path.cwd()), sets=sets)
    return rebase_sources(here, Path.cwd(), folder.resolve())


def write_recipe(folder: Path, params: str, base: Path) -> None:
    """Give ``folder`` a params.yaml with the text ``params`` and the dvc.yaml of ``base``; equal files stay."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        texts = {PARAMS_FILE: params, DVC_FILE: (base / DVC_FILE).read_text(encoding="utf-8")}
        for name, default in ((".dvcignore", DVC_IGNORE), (".gitignore", GIT_IGNORE)):
            if not (folder / name).exists():
                texts[name] = default
        for name, text in texts.items():
            path = folder / name
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                atomic_write_text(path, text)
    except OSError as error:
        raise unwritable(folder, error) from error


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
        raise unwritable(workspace, error) from error


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


def show_path(path: Path) -> str:
    """A path as a person would type it from here."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("../..") else relative
