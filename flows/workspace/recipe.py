"""The recipe of a workspace: dvc.yaml, and params.yaml merged from a base, a profile and overrides."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from pathlib import Path

from flows.workspace.folder import cannot_write
from rlhf_core.config.loading import yaml_text
from rlhf_core.config.loading.load import PARAMS_FILE
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
    "/.rlhf/\n/work/\n/workspaces/\n/ablation/\n/mlflow.db\n/mlartifacts/\n/report.html\n/release.html\n/dvc_plots/\n"
    "__pycache__/\n"
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
        texts = {PARAMS_FILE: params, DVC_FILE: (base / DVC_FILE).read_text(encoding="utf-8")}
        (folder / EXPECTATIONS).mkdir(exist_ok=True)
        for suite in sorted(expectations_of(base).glob("*.json")):
            texts[f"{EXPECTATIONS}/{suite.name}"] = suite.read_text(encoding="utf-8")
        for name, default in ((".dvcignore", DVC_IGNORE), (".gitignore", GIT_IGNORE)):
            if not (folder / name).exists():
                texts[name] = default
        for name, text in texts.items():
            path = folder / name
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                atomic_write_text(path, text)
    except OSError as error:
        raise cannot_write(folder, error) from error
