"""The recipe of a workspace or a trial: dvc.yaml, and params.yaml with profile and overrides."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flows.dvc_repo.inputs import DVC_FILE, EXPECTATIONS, entry_names, with_sources
from flows.dvc_repo.root import ensure_dvc, share_settings
from flows.workspace import is_workspace
from rlhf_core.config import yaml_text
from rlhf_core.config.loading import PARAMS_FILE, check_params, load_params, load_section
from rlhf_core.config.operations import RegistryConfig
from rlhf_core.config.params import Params
from rlhf_core.config.paths import rebase_sources
from rlhf_core.config.profiles import (
    DEFAULT_PROFILE,
    merge,
    overlaid,
    overlays_of,
    overridden,
    profile_names,
    profile_text,
    workspace_name,
)
from rlhf_core.config.recipe import (
    expectations_of,
    profile_headers,
    profiles_of,
    require_merged_lock,
)
from rlhf_core.errors import ConfigError, cannot_write
from rlhf_core.fingerprint.tracked_files import function_files, verifiable_functions
from rlhf_core.storage.files import atomic_write_text

# Opens what the comment at the top of params.yaml says about the profile.
PROFILE_LINE = "# Profile "
HEADER_WIDTH = 118
TRIALS = "workspaces"
ABSENT = object()
DVC_IGNORE = "# never part of a dependency or an output\n__pycache__\n*.pyc\n.rlhf\nwork\n"
GIT_IGNORE = (
    "/.rlhf/",
    "/work/",
    "/workspaces/",
    "/ablation/",
    "/mlflow.db",
    "/mlartifacts/",
    "/release.html",
    "/dvc_plots/",
    "__pycache__/",
)


def merged_params(
    base: Path,
    profile: str | None,
    sets: Sequence[str],
    folder: Path,
    beneath: Sequence[str] = (),
) -> str:
    """Merge params.yaml of ``base``, a profile and overrides into the text for ``folder``.

    Relative data paths in params.yaml and profiles start at ``base``, those in ``sets`` at the
    current folder. What is set ``beneath`` the profile chooses none.
    """
    recipe = overlaid((base / PARAMS_FILE).read_text(encoding="utf-8"), sets=beneath)
    overlays = overlays_of(recipe, profiles_of(base), profile, sets)
    # What an overlay asks for may hold only with an override.
    text = overlaid(recipe, overlays, [f"profile={profile}"] if profile else ())
    here = Path.cwd()
    from_here = rebase_sources(text, base.resolve(), here)
    merged = merge(from_here, sets=sets)
    params = rebase_sources(merged, here, folder.resolve())
    if not profile:
        return params
    headers = profile_headers(profiles_of(base))
    header = " ".join(headers[name] for name in profile_names(profile))
    return with_profile_header(params, profile, header)


def with_profile_header(params: str, profile: str, header: str) -> str:
    """Replace what the opening comment of params.yaml says of its profile by ``header``."""
    left = params.splitlines()
    lines = []
    while left and left[0].startswith("#") and not left[0].startswith(PROFILE_LINE):
        lines.append(left.pop(0))
    while left and left[0].startswith("#"):  # what was said of the profile so far
        left.pop(0)
    about = f"Profile {profile}: {header}"
    for line in textwrap.wrap(about, HEADER_WIDTH, break_on_hyphens=False):
        lines.append(f"# {line}")
    return "\n".join([*lines, *left]) + "\n"


def write_recipe(folder: Path, params: str, base: Path) -> None:
    """Write params.yaml, and dvc.yaml, expectations and functions of ``base``, into ``folder``.

    Unchanged files are left alone.

    Raises:
        RlhfError: the folder cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        recipe = (base / DVC_FILE).read_text(encoding="utf-8")
        document = yaml_text.parse(params, PARAMS_FILE)
        checked = check_params(yaml_text.plain(document))
        texts = {
            PARAMS_FILE: params,
            DVC_FILE: with_sources(recipe, checked, folder.resolve()),
            ".gitignore": _with_ignores(folder / ".gitignore", recipe),
        }
        if not (folder / ".dvcignore").exists():
            texts[".dvcignore"] = DVC_IGNORE
        (folder / EXPECTATIONS).mkdir(exist_ok=True)
        suites = expectations_of(base)
        files = [*suites.glob("*.json"), *suites.glob("*.py")]
        for file in sorted(files):
            texts[f"{EXPECTATIONS}/{file.name}"] = file.read_text(encoding="utf-8")
        functions = (
            *checked.ppo.reward.sources,
            *verifiable_functions(checked.evaluate.verifiable),
        )
        for module in function_files(base, functions):
            texts[module] = (base / module).read_text(encoding="utf-8")
        for name, text in texts.items():
            path = folder / name
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                atomic_write_text(path, text)
    except OSError as error:
        raise cannot_write(folder, error) from error


def _with_ignores(file: Path, dvc_yaml: str) -> str:
    """Return .gitignore with every output, which DVC adds only with git, and what runs leave."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    recipe = yaml_text.plain(yaml_text.parse(dvc_yaml, DVC_FILE))
    stages = recipe.get("stages") or {}
    wanted = [*GIT_IGNORE]
    for stage in stages.values():
        for key in ("outs", "metrics", "plots"):
            wanted += [f"/{name}" for name in entry_names(stage.get(key))]
    known = text.splitlines()
    for line in wanted:
        if line not in known:
            text += f"{line}\n"
    return text


def check_recipe(workspace: Path) -> None:
    """Check that dvc.lock is merged, and that params.yaml has what dvc.yaml's stages name.

    The program has defaults for them, but DVC compares what is written in the file.

    Raises:
        ConfigError: dvc.lock has conflicts, or some are left out; the message has the lines to add.
    """
    require_merged_lock(workspace)
    document = yaml_text.plain(yaml_text.read(workspace / PARAMS_FILE))
    defaults = Params().model_dump(mode="json", by_alias=True)
    without_default = []
    given: dict[str, Any] = {}
    for path in tracked_params(workspace):
        if _value_at(document, path) is not ABSENT:
            continue
        value = _value_at(defaults, path)
        if value in (ABSENT, None, []):
            without_default.append(path)
        elif isinstance(value, dict):
            # Of a section the name is enough, and its kind where it is one of several.
            given[path] = {"kind": value["kind"]} if "kind" in value else {}
        else:
            given[path] = value
    if not given and not without_default:
        return
    lines = overridden({}, given)
    message = [
        f"{workspace / PARAMS_FILE} leaves out parameters that {DVC_FILE} names, so DVC would refuse its stages"
    ]
    if lines:
        message.append("add these, which are the defaults, to their sections:")
        message += [f"  {line}" for line in yaml_text.dump(lines).splitlines()]
    if without_default:
        message.append(
            f"add {', '.join(without_default)}, which no default can stand for (`rlhf init DIR` has examples)"
        )
    raise ConfigError("\n".join(message))


def tracked_params(workspace: Path) -> list[str]:
    """Return the dotted names of parameters in dvc.yaml, each once, a section before its parts."""
    recipe = yaml_text.plain(yaml_text.read(workspace / DVC_FILE))
    stages = recipe.get("stages") or {}
    names: set[str] = set()
    for stage in stages.values():
        for entry in stage.get("params") or []:
            if isinstance(entry, str):
                names.add(entry)
            elif isinstance(entry, Mapping):
                names.update(entry.get(PARAMS_FILE) or [])
    return sorted(names)


def _value_at(document: Any, path: str) -> Any:
    for part in path.split("."):
        if not isinstance(document, Mapping) or part not in document:
            return ABSENT
        document = document[part]
    return document


def trial_workspace(base: Path, profile: str | None, sets: Sequence[str]) -> Path:
    """Return the workspace of a profile and overrides, made or updated under ``base/workspaces``.

    It shares the DVC cache of ``base``, so that equal stages are not computed again, and its
    remotes. Its registered models have names of their own, unless the profile or ``sets`` name
    them: on a server, a trial does not meet the models of ``base``.
    """
    chosen = profile or load_params(base).profile or DEFAULT_PROFILE
    name = workspace_name(chosen, sets)
    folder = base / TRIALS / name
    named = [*_own_model_names(base, profile, name, folder), *sets]
    params = merged_params(base, profile, named, folder)
    write_recipe(folder, params, base)
    ensure_dvc(base)
    ensure_dvc(folder)
    share_settings(base, folder)
    return folder


def _own_model_names(base: Path, profile: str | None, trial: str, folder: Path) -> list[str]:
    """Overrides that name the models of a trial: ``rlhf-policy-TRIAL`` for ``rlhf-policy``.

    A trial that exists keeps the names it has, and so its champion.
    """
    if is_workspace(folder):
        names = load_section(folder, "registry", RegistryConfig)
        policy, reward_model = names.policy, names.reward_model
    else:
        names = load_section(base, "registry", RegistryConfig)
        chosen: dict[str, str] = {}
        # Names that a profile gives are for its own workspace, not for those with further settings.
        if profile and trial == workspace_name(profile, ()):
            for name in profile_names(profile):
                overlay = yaml_text.parse(profile_text(profiles_of(base), name), name)
                chosen |= overlay.get("registry") or {}
        policy = chosen.get("policy") or f"{names.policy}-{trial}"
        reward_model = chosen.get("reward_model") or f"{names.reward_model}-{trial}"
    return [f"registry.policy={policy}", f"registry.reward_model={reward_model}"]
