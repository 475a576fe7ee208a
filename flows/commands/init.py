"""``rlhf init``, and the workspaces of trials: params.yaml merged from overlays, dvc.yaml, a DVC root."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flows.dvc_repo.root import cache_of, ensure_dvc
from flows.workspace.folder import is_workspace
from flows.workspace.recipe import TRIALS, merged_params, write_recipe
from rlhf_core.config.loading.overlay import DEFAULT_PROFILE, workspace_name
from rlhf_core.config.loading.recipe import recipe_folder
from rlhf_core.errors import RlhfError


def initialise(
    folder: Path, profile: str | None, sets: Sequence[str], *, base: Path | None = None, cache: Path | None = None
) -> Path:
    """Make ``folder`` a workspace and return its absolute path. Everything is checked before anything is written.

    Args:
        base: the workspace whose recipe is copied, by default the project's own.
        cache: a DVC cache to share with other workspaces.

    Raises:
        RlhfError: ``folder`` is already a workspace, or a parameter is wrong.
    """
    if is_workspace(folder):
        raise RlhfError(f"{folder} is already a workspace; edit its params.yaml, or choose another folder")
    params = merged_params(base or recipe_folder(), profile, sets, folder)
    write_recipe(folder, params, base or recipe_folder())
    ensure_dvc(folder.resolve(), cache)
    return folder.resolve()


def trial_workspace(base: Path, profile: str | None, sets: Sequence[str]) -> Path:
    """Return the workspace of a profile and overrides under ``base/workspaces``, created or updated from ``base``.

    It shares the DVC cache of ``base``, so that equal stages are not computed again.
    """
    folder = base / TRIALS / workspace_name(profile or DEFAULT_PROFILE, sets)
    write_recipe(folder, merged_params(base, profile, sets, folder), base)
    ensure_dvc(base)
    ensure_dvc(folder, cache_of(base))
    return folder
