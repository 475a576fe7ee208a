"""``rlhf init``: params.yaml merged from overlays, dvc.yaml, a DVC root, and what to do next."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flows.dvc_repo import inputs
from flows.dvc_repo.inputs import DVC_FILE
from flows.dvc_repo.recipe import merged_params, write_recipe
from flows.dvc_repo.root import ensure_dvc
from flows.workspace import (
    display_path,
    find_workspace,
    is_elsewhere,
    is_workspace,
    matching_files,
)
from rlhf_core.config import yaml_text
from rlhf_core.config.base import SCRATCH, BaseConfig, is_pretrained
from rlhf_core.config.data import CollectConfig
from rlhf_core.config.loading import PARAMS_FILE, check_params, load_params, load_section
from rlhf_core.config.params import Params
from rlhf_core.config.paths import rebase_sources
from rlhf_core.config.recipe import recipe_folder
from rlhf_core.errors import RlhfError, cannot_write
from rlhf_core.plugins import model_plugins
from rlhf_core.storage.data_files import require_no_key
from rlhf_core.storage.files import scratch_folder

if TYPE_CHECKING:
    from flows.commands.init_checker import GivenFunction

OWN_DATA = "own-data"  # the profile of a workspace with files of pairs
WANTED_MODEL = "a starting model is a Hugging Face folder, a .gguf file or a hub id"


@dataclass(frozen=True)
class Predecessor:
    """A registered policy from which another run goes on, with the workspace that trained it."""

    workspace: Path
    model: Path
    name: str

    @property
    def settings(self) -> list[str]:
        """What differs from the settings of its workspace.

        Without supervised steps it is the SFT model as it is: such steps would undo what PPO has
        taught. So the new policy is measured against it, and the policy gate says whether it is
        better than the one in use. Rates that suited a model made from nothing suit its policy.
        """
        changed = [
            f"base.source={json.dumps(str(self.model))}",
            "base.revision=null",
            "sft.steps=0",
        ]
        if not is_pretrained(load_params(self.workspace).base.source):
            changed += ["base.pretraining=null", "base.allow_high_learning_rates=true"]
        return changed

    def for_files(self) -> tuple[list[str], list[str]]:
        """Leave out what gates ask of the synthetic world alone, for pairs in files.

        Returns:
            Settings, and the metrics that are no longer asked for.
        """
        gates = load_params(self.workspace).gates
        settings: list[str] = []
        left_out: list[str] = []
        for name, conditions in (("reward", gates.reward or ()), ("policy", gates.policy)):
            asked = [condition for condition in conditions if condition.is_of_the_world]
            if asked:
                left_out += [condition.metric for condition in asked]
                kept = [
                    one.model_dump(exclude_unset=True) for one in conditions if one not in asked
                ]
                settings.append(f"gates.{name}={json.dumps(kept)}")
        return settings, left_out


def predecessor(given: str) -> Predecessor:
    """Find the policy that ``WORKSPACE@ALIAS`` names; without an alias it is the champion.

    Raises:
        RlhfError: There is no such workspace or version, or its files are not the registered ones.
    """
    from flows.registry.client import CHAMPION
    from flows.registry.stored_models import policy_with_alias, verified_folder

    name, _, alias = given.rpartition("@") if "@" in Path(given).name else (given, "", CHAMPION)
    workspace = find_workspace(Path(name))
    version = policy_with_alias(workspace, alias)
    model = verified_folder(workspace, version)
    return Predecessor(
        workspace, model.resolve(), f"{version.name} version {version.version} (@{alias})"
    )


def create(
    folder: Path,
    *,
    profile: str = "",
    sets: Sequence[str] = (),
    data: Sequence[str] = (),
    prompts: Sequence[str] = (),
    reward: str = "",
    model: str = "",
    cache: Path | None = None,
    origin: str = "",
    probe: bool = True,
) -> tuple[str, bool]:
    """Make a workspace of what `rlhf init` was given.

    Returns:
        What to tell of it, and whether it is ready to run.

    Args:
        folder: The folder to make.
        profile: Overlays on params.yaml, separated by commas.
        sets: ``section.key=value`` each, over the profile.
        data: Files with pairs of replies.
        prompts: Files with prompts in place of pairs, for ``reward``.
        reward: The function that rewards replies to them, ``FILE.py:FUNCTION``.
        model: The starting model.
        cache: A DVC cache to share with other workspaces.
        origin: The registered policy to go on from, ``WORKSPACE@ALIAS``, in place of ``model``.
        probe: Try passes on this machine, to say how long a run takes.

    Raises:
        RlhfError: What was given contradicts itself or is not there; nothing was made.
    """
    require_no_key(str(folder.absolute()))
    if origin and model:
        raise RlhfError("--from names the starting model; leave --model out")
    refuse_unusable(folder, cache)
    refuse_absent([*data, *prompts], model)
    settings: list[str] = []
    if data:
        settings += ["collect.source=files", f"collect.files.preferences={json.dumps(data)}"]
        profile = profile or ("" if origin else OWN_DATA)
    if model:
        settings.append(f"base.source={model}")
    recipe, beneath = recipe_folder(), list[str]()
    function: GivenFunction | None = None
    told: list[str] = []
    if prompts or reward:
        from flows.commands import init_checker

        if data or origin or not (prompts and reward):
            raise RlhfError(
                "--prompts and --reward go together, without --data, which has pairs, or --from; nothing was made"
            )
        function = init_checker.given_function(reward)
        profile = profile or init_checker.PROFILE
        settings = [*init_checker.checker_settings(prompts, function), *settings]
    elif origin:
        before = predecessor(origin)
        recipe, beneath = before.workspace, before.settings
        told.append(f"it goes on from {before.name}, which the new policy is compared with")
        if data and not profile:
            without, left_out = before.for_files()
            beneath += without
            if left_out:
                told.append(
                    f"not asked, since only the synthetic world shows it: {', '.join(left_out)}"
                )
    settings += sets
    # The folder may not exist yet, so that paths which start there lead nowhere.
    text = merged_params(recipe, profile or None, settings, folder, beneath)
    seen_here = rebase_sources(text, folder.resolve(), Path.cwd())
    params = check_params(yaml_text.plain(yaml_text.parse(seen_here, PARAMS_FILE)))
    refuse_unreadable(params)
    if function is not None:
        told.append(init_checker.require_enough_prompts(params, function))
    told.append(forecast_of(folder, params, recipe, probe=probe))
    with removed_if_it_fails(folder):
        workspace = initialise(folder, profile or None, settings, cache, recipe, beneath)
        if function is not None:
            function.copy_into(workspace)
    # A source that is missing or out of reach is for the next step, or the run, to name.
    with suppress(RlhfError):
        inputs.refresh_inputs(workspace)  # so that `dvc repro` and `dvc status` work at once
    step, is_ready = next_step(workspace)
    told.append(step)
    return "\n".join(text.rstrip() for text in told if text), is_ready


def initialise(
    folder: Path,
    profile: str | None,
    sets: Sequence[str],
    cache: Path | None = None,
    recipe: Path | None = None,
    beneath: Sequence[str] = (),
) -> Path:
    """Make ``folder`` a workspace and return its path; everything is checked before it is written.

    Args:
        cache: a DVC cache to share with other workspaces.
        recipe: whose params.yaml, dvc.yaml and expectations it starts from; by default the
            project's.
        beneath: ``section.key=value`` each, over that params.yaml and beneath the profile.

    Raises:
        RlhfError: ``folder`` is already a workspace, or a parameter is wrong.
    """
    refuse_unusable(folder)
    recipe = recipe or recipe_folder()
    write_recipe(folder, merged_params(recipe, profile, sets, folder, beneath), recipe)
    ensure_dvc(folder.resolve(), cache)
    return folder.resolve()


def refuse_unusable(folder: Path, cache: Path | None = None) -> None:
    """Refuse a folder that cannot become a workspace, or a cache that cannot be written to.

    Raises:
        RlhfError: It is a workspace, has files that would be lost, or cannot be written to.
    """
    if is_workspace(folder):
        raise RlhfError(
            f"{folder} is already a workspace; edit its params.yaml, or choose another folder"
        )
    for name in (PARAMS_FILE, DVC_FILE):
        if (folder / name).exists():
            raise RlhfError(
                f"{folder} has a {name} already, which would be lost; move it away, or choose another folder"
            )
    for path in filter(None, (folder, cache)):
        # One that does not exist yet is made in the nearest that does.
        there = [part for part in (path.absolute(), *path.absolute().parents) if part.exists()]
        try:
            with scratch_folder(".rlhf-", there[0]):
                pass
        except OSError as error:
            raise cannot_write(path, error) from error


def refuse_absent(data: Sequence[str], model: str) -> None:
    """Refuse files and models that a command names and the current folder does not have.

    Raises:
        RlhfError: No file matches one of ``data``, or there is no model at the path ``model``.
    """
    absent = _unmatched(data, Path.cwd())
    if absent:
        raise RlhfError(f"no file matches {', '.join(absent)}; nothing was made")
    if not model:
        return
    if _is_absent(model, Path.cwd()):
        raise RlhfError(f"--model: there is no file or folder {model}; nothing was made")
    path = Path(os.path.expanduser(model))
    if path.is_file() and not model_plugins(path):
        raise RlhfError(f"--model: {model} is a file, but {WANTED_MODEL}; nothing was made")
    is_model = any((path / name).is_file() for name in ("config.json", "adapter_config.json"))
    if path.is_dir() and not is_model:
        raise RlhfError(
            f"--model: {model} has no config.json, and {WANTED_MODEL}; nothing was made"
        )


def refuse_unreadable(params: Params) -> None:
    """Refuse data files without pairs and a starting model that stage base would refuse.

    What is not on this machine is left to the run. Only the beginning of files is read.

    Args:
        params: Relative paths in them start at the current folder.

    Raises:
        RlhfError: One cannot be used.
    """
    from flows.commands.doctor import unread_sources

    here = Path.cwd()
    if params.collect.source == "files":
        for unread in unread_sources(here, params.collect.files.preferences):
            finding = unread.finding.rstrip(".")
            raise RlhfError(f"{finding} ({unread.remedy}); nothing was made")
    model = here / Path(os.path.expanduser(params.base.source))
    if params.base.source == SCRATCH or not model.exists():
        return
    from rlhf_core.models.foreign import open_starting_model
    from rlhf_core.models.readers import is_model_file, model_reader

    try:
        if is_model_file(model):
            model_reader(model).read_config(model)  # the forecast reads its tokenizer
        else:
            open_starting_model(here, params.base.source)
    except RlhfError as error:
        raise RlhfError(f"{error}; nothing was made") from error


def forecast_of(folder: Path, params: Params, recipe: Path, *, probe: bool = True) -> str:
    """Say what the pairs of a new workspace are enough for, and what installed forecasts say of its
    run.

    Where the data are elsewhere, nothing is said of them.

    Args:
        params: Relative paths in them start at the current folder.
        recipe: Whose expectations check the rows.
        probe: Try passes on this machine.

    Raises:
        RlhfError: A stage or the reward gate would refuse the data.
    """
    from rlhf_core.forecast import as_text
    from rlhf_core.stages.pair_supply import supply_of_files
    from rlhf_core.stages.run_forecasts import lines_text, run_forecasts

    here = Path.cwd()
    try:
        supply = supply_of_files(here, params, expectations=recipe / "expectations")
    except RlhfError as error:
        raise RlhfError(f"{str(error).rstrip('.')}; nothing was made") from error
    found, refusal = supply.pairs, supply.refusal
    if found is not None:
        refusal = refusal or found.refusal
    if refusal:
        raise RlhfError(f"{refusal}; nothing was made")
    lines = [] if found is None else [as_text(found)]
    lines.append(lines_text(run_forecasts(here, params, supply, probe=probe)))
    return "\n".join(filter(None, lines))


@contextmanager
def removed_if_it_fails(folder: Path) -> Iterator[None]:
    """Remove what the block has made of ``folder`` where it ends in an error.

    Else the corrected command would find a workspace.
    """
    missing = [part for part in (folder, *folder.parents) if not part.exists()]
    kept = set(folder.iterdir()) if folder.is_dir() else set()
    try:
        yield
    except BaseException:
        made = missing[-1:] or [path for path in folder.iterdir() if path not in kept]
        for path in made:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        raise


def next_step(workspace: Path) -> tuple[str, bool]:
    """Return what to do with a new workspace, and whether that is to run it.

    Else it lacks what its settings name: its data or the starting model.
    """
    name = display_path(workspace)
    run = f"rlhf run --workspace {shlex.quote(name)}"
    lacking = _lacking(workspace, name)
    if lacking:
        return f"{name} is made, but {lacking}, then: {run}", False
    source = load_section(workspace, "base", BaseConfig).source
    fetched = ""
    if source != "scratch" and not (workspace / Path(os.path.expanduser(source))).exists():
        fetched = f" ({source} is not on this machine, and untried: `rlhf doctor` tries the hub)"
    sources = load_section(workspace, "collect", CollectConfig)
    world = ""
    if sources.source == "world" and sources.files.paths():
        world = ", on the synthetic world: collect.files are read with collect.source=files"
    return f"{name} is ready{world}{fetched}; next: {run}", True


def _lacking(workspace: Path, name: str) -> str:
    """Return what keeps a new workspace from running and what to do about it; else empty."""
    model = load_section(workspace, "base", BaseConfig).source
    if _is_absent(model, workspace):
        return (
            f"there is no starting model at {model}, seen from there: correct base.source in "
            f"{name}/{PARAMS_FILE}"
        )
    sources = load_section(workspace, "collect", CollectConfig)
    if sources.source == "world":
        return ""
    if sources.pairs and not sources.files.preferences:
        return (
            "its data are missing: name files with pairs of replies under "
            f"collect.files.preferences in {name}/{PARAMS_FILE} (`rlhf data FILE` shows how one is read)"
        )
    from flows.commands.doctor import unread_sources

    missing = _unmatched(sources.files.paths(), workspace)
    if missing:
        return (
            f"no file matches {', '.join(missing)}, seen from there: put the files there, or "
            f"correct collect.files in {name}/{PARAMS_FILE}"
        )
    unread = next(unread_sources(workspace, sources.files.preferences), None)
    if unread is not None:
        return (
            f"not ready. {unread.finding.rstrip('.')}. Correct the file, or collect.files in "
            f"{name}/{PARAMS_FILE} ({unread.remedy})"
        )
    return ""


def _is_absent(model: str, folder: Path) -> bool:
    """Whether a starting model is a path, rather than a hub id, and nothing lies there."""
    is_path = model.startswith((".", "/", "~")) or model.lower().endswith(".gguf")
    return is_path and not (folder / Path(os.path.expanduser(model))).exists()


def _unmatched(sources: Sequence[str], folder: Path) -> list[str]:
    """Those of ``sources`` that name no file, seen from ``folder``."""
    unmatched = []
    for source in sources:
        if not is_elsewhere(source) and not matching_files(source, folder):
            unmatched.append(source)
    return unmatched
