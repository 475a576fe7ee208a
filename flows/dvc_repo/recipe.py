"""The recipe of a workspace: dvc.yaml, and params.yaml merged from a base, a profile and overrides."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from pathlib import Path

from flows.dvc_repo.inputs import with_sources
from flows.workspace.folder import cannot_write
from rlhf_core.config.loading import yaml_text
from rlhf_core.config.loading.load import PARAMS_FILE, check_params
from rlhf_core.config.loading.overlay import merge, overlaid, overlays_of, rebase_sources
from rlhf_core.config.loading.recipe import expectations_of, profile_headers, profiles_of
from rlhf_core.storage.files import atomic_write_text

PROFILE_LINE = "# Profile "  # opens what the comment at the top of params.yaml says about the profile
HEADER_WIDTH = 118
DVC_FILE = "dvc.yaml"
EXPECTATIONS = "expectations"
TRIALS = "workspaces"
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


def merged_params(base: Path, profile: str | None, sets: Sequence[str], folder: Path) -> str:
    """Merge params.yaml of ``base``, a profile and ``section.key=value`` overrides into the text for ``folder``.

    Relative data paths in params.yaml and profiles start at ``base``, those in ``sets`` at the current folder.
    """
    recipe = (base / PARAMS_FILE).read_text(encoding="utf-8")
    overlays = overlays_of(recipe, profiles_of(base), profile, sets)
    if profile:
        overlays.append(("the profile's name", yaml_text.dump({"profile": profile})))
    # What an overlay asks for may hold only with an override.
    text = overlaid(recipe, overlays)
    from_current_folder = merge(rebase_sources(text, base.resolve(), Path.cwd()), sets=sets)
    params = rebase_sources(from_current_folder, Path.cwd(), folder.resolve())
    return with_profile_header(params, profile, profile_headers(profiles_of(base))[profile]) if profile else params


def with_profile_header(params: str, profile: str, header: str) -> str:
    """Replace what the opening comment of params.yaml says about the profile that it is by ``header``."""
    lines = params.splitlines()
    end = next((number for number, line in enumerate(lines) if not line.startswith("#")), len(lines))
    general = itertools.takewhile(lambda line: not line.startswith(PROFILE_LINE), lines[:end])
    comment = textwrap.wrap(f"Profile {profile}: {header}", HEADER_WIDTH, break_on_hyphens=False)
    return "\n".join([*general, *(f"# {line}" for line in comment), *lines[end:]]) + "\n"


def write_recipe(folder: Path, params: str, base: Path) -> None:
    """Write ``params`` as params.yaml, and dvc.yaml and the suites of expectations of ``base``, into ``folder``.

    Unchanged files are left alone.

    Raises:
        RlhfError: the folder cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        recipe = (base / DVC_FILE).read_text(encoding="utf-8")
        texts = {
            PARAMS_FILE: params,
            DVC_FILE: with_sources(
                recipe, check_params(yaml_text.plain(yaml_text.parse(params, PARAMS_FILE))), folder.resolve()
            ),
            ".gitignore": _with_ignores(folder / ".gitignore", recipe),
        }
        if not (folder / ".dvcignore").exists():
            texts[".dvcignore"] = DVC_IGNORE
        (folder / EXPECTATIONS).mkdir(exist_ok=True)
        for suite in sorted(expectations_of(base).glob("*.json")):
            texts[f"{EXPECTATIONS}/{suite.name}"] = suite.read_text(encoding="utf-8")
        for name, text in texts.items():
            path = folder / name
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                atomic_write_text(path, text)
    except OSError as error:
        raise cannot_write(folder, error) from error


def _with_ignores(file: Path, dvc_yaml: str) -> str:
    """Return .gitignore with every output and what runs leave behind: DVC adds outputs only where there is git."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    stages = yaml_text.plain(yaml_text.parse(dvc_yaml, DVC_FILE)).get("stages") or {}
    lists = [stage.get(key) or [] for stage in stages.values() for key in ("outs", "metrics", "plots")]
    entries = [entry for listed in lists for entry in listed]
    outputs = [f"/{entry if isinstance(entry, str) else next(iter(entry))}" for entry in entries]
    missing = [line for line in (*GIT_IGNORE, *outputs) if line not in text.splitlines()]
    return text + "".join(f"{line}\n" for line in missing)
