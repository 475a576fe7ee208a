"""``rlhf init``, and the workspaces of trials: params.yaml merged from overlays, dvc.yaml, a DVC root."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from flows.dvc_repo.inputs import DVC_FILE
from flows.dvc_repo.recipe import TRIALS, merged_params, write_recipe
from flows.dvc_repo.root import ensure_dvc, share_settings
from flows.workspace import display_path, is_elsewhere, is_workspace, matching_files
from rlhf_core.config import yaml_text
from rlhf_core.config.base import BaseConfig
from rlhf_core.config.data import CollectConfig
from rlhf_core.config.loading import (
    DEFAULT_PROFILE,
    PARAMS_FILE,
    load_params,
    load_section,
    profile_names,
    profile_text,
    workspace_name,
)
from rlhf_core.config.operations import RegistryConfig
from rlhf_core.config.recipe import profiles_of, recipe_folder
from rlhf_core.errors import RlhfError


def initialise(folder: Path, profile: str | None, sets: Sequence[str], cache: Path | None = None) -> Path:
    """Make ``folder`` a workspace and return its absolute path. Everything is checked before anything is written.

    Args:
        cache: a DVC cache to share with other workspaces.

    Raises:
        RlhfError: ``folder`` is already a workspace, or a parameter is wrong.
    """
    if is_workspace(folder):
        raise RlhfError(f"{folder} is already a workspace; edit its params.yaml, or choose another folder")
    for name in (PARAMS_FILE, DVC_FILE):
        if (folder / name).exists():
            raise RlhfError(
                f"{folder} has a {name} already, which would be lost; move it away, or choose another folder"
            )
    write_recipe(folder, merged_params(recipe_folder(), profile, sets, folder), recipe_folder())
    ensure_dvc(folder.resolve(), cache)
    return folder.resolve()


def refuse_absent(data: Sequence[str], model: str | None) -> None:
    """Refuse what a command names and the current folder does not have, before a workspace is made of a slip.

    Raises:
        RlhfError: No file matches one of ``data``, or there is nothing at the path ``model``.
    """
    absent = _unmatched(data, Path.cwd())
    if absent:
        raise RlhfError(f"no file matches {', '.join(absent)}; nothing was made")
    if model and _is_absent(model, Path.cwd()):
        raise RlhfError(f"--model: there is no file or folder {model}; nothing was made")


def next_step(workspace: Path) -> str:
    """Return what to do with a new workspace: run it, or first name the data files that it lacks."""
    name = display_path(workspace)
    run = f"rlhf run --workspace {shlex.quote(name)}"
    model = load_section(workspace, "base", BaseConfig).source
    if _is_absent(model, workspace):
        return (
            f"{name} is made, but there is no starting model at {model}, seen from there: correct base.source in "
            f"{name}/{PARAMS_FILE}, then: {run}"
        )
    sources = load_section(workspace, "collect", CollectConfig)
    if sources.source == "world":
        world = ", on the synthetic world: collect.files are read with collect.source=files"
        return f"{name} is ready{world if sources.files.paths() else ''}; next: {run}"
    if sources.pairs and not sources.files.preferences:
        return (
            f"{name} is made, but its data are missing: name files with pairs of replies under "
            f"collect.files.preferences in {name}/{PARAMS_FILE} (`rlhf data FILE` shows how one is read), then: {run}"
        )
    from flows.commands.doctor import unread_sources

    missing = _unmatched(sources.files.paths(), workspace)
    if missing:
        return (
            f"{name} is made, but no file matches {', '.join(missing)}, seen from there: put the files there, or "
            f"correct collect.files in {name}/{PARAMS_FILE}, then: {run}"
        )
    unread = next(unread_sources(workspace, sources.files.preferences), None)
    if unread is not None:
        return (
            f"{name} is made, but not ready. {unread.finding.rstrip('.')}. Correct the file, or collect.files in "
            f"{name}/{PARAMS_FILE} ({unread.remedy}), then: {run}"
        )
    return f"{name} is ready; next: {run}"


def _is_absent(model: str, folder: Path) -> bool:
    """Whether a starting model is a path, rather than a hub id, and nothing lies there."""
    is_path = model.startswith((".", "/", "~")) or model.lower().endswith(".gguf")
    return is_path and not (folder / Path(os.path.expanduser(model))).exists()


def _unmatched(sources: Sequence[str], folder: Path) -> list[str]:
    """Those of ``sources`` that name no file, seen from ``folder``."""
    return [source for source in sources if not (is_elsewhere(source) or matching_files(source, folder))]


def trial_workspace(base: Path, profile: str | None, sets: Sequence[str]) -> Path:
    """Return the workspace of a profile and overrides under ``base/workspaces``, created or updated from ``base``.

    It shares the DVC cache of ``base``, so that equal stages are not computed again, and its remotes. Its registered
    models have names of their own, unless the profile or ``sets`` name them: on a server, a trial does not meet the
    models of ``base``.
    """
    name = workspace_name(profile or load_params(base).profile or DEFAULT_PROFILE, sets)
    folder = base / TRIALS / name
    named = [*_own_model_names(base, profile, name, folder), *sets]
    write_recipe(folder, merged_params(base, profile, named, folder), base)
    ensure_dvc(base)
    ensure_dvc(folder)
    share_settings(base, folder)
    return folder


def _own_model_names(base: Path, profile: str | None, trial: str, folder: Path) -> list[str]:
    """Overrides that name the registered models of a trial: ``rlhf-policy-TRIAL`` for ``rlhf-policy``.

    A trial that exists keeps the names it has, and so its champion.
    """
    if is_workspace(folder):
        names = load_section(folder, "registry", RegistryConfig)
        return [f"registry.policy={names.policy}", f"registry.reward_model={names.reward_model}"]
    names = load_section(base, "registry", RegistryConfig)
    chosen: dict[str, str] = {}
    # Names that a profile gives are for its own workspace, not for those with further settings.
    for name in profile_names(profile) if profile and trial == workspace_name(profile, ()) else ():
        chosen |= yaml_text.parse(profile_text(profiles_of(base), name), name).get("registry") or {}
    own = {"policy": names.policy, "reward_model": names.reward_model}
    return [f"registry.{key}={chosen.get(key) or f'{value}-{trial}'}" for key, value in own.items()]
