"""``rlhf init`` and the workspaces of trials: merged params.yaml, dvc.yaml, a DVC root, a shared cache if wanted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flows.dvc_repo.root import cache_of, ensure_dvc
from flows.workspace.folder import is_workspace
from flows.workspace.recipe import TRIALS, recipe, write_recipe
from rlhf_core.config.loading.overlay import DEFAULT_PROFILE, workspace_name
from rlhf_core.config.loading.recipe import recipe_folder
from rlhf_core.errors import RlhfError


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
