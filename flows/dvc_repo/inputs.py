"""What DVC is to compare: source files in dvc.yaml, code and remote sources in ``.fingerprints``.

DVC hashes local source files itself, so that `dvc status` tells of a changed one; params.yaml names
them, and dvc.yaml repeats them. Code counts by its definitions and a URL by its store's checksum,
which `rlhf fingerprint` writes down.
"""

from __future__ import annotations

import io
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from flows.dvc_repo.root import follow_git
from flows.supervision.processes import run_module
from flows.workspace import is_elsewhere, matching_files
from rlhf_core.config.loading import load_params
from rlhf_core.config.params import Params
from rlhf_core.config.recipe import recipe_folder
from rlhf_core.data.collection.sources import collected_paths
from rlhf_core.errors import RlhfError
from rlhf_core.storage.files import atomic_write_text

DVC_FILE = "dvc.yaml"
FINGERPRINTS = ".fingerprints/"
EXPECTATIONS = "expectations"
# Files of the workspace itself that a stage reads, whatever params.yaml says.
OF_WORKSPACE = {"validate": [EXPECTATIONS]}
WILD = ("*", "?", "[")


def refresh_inputs(workspace: Path) -> None:
    """Bring dvc.yaml's source files, ``.fingerprints`` and what DVC knows of git up to date.

    Unchanged files are left alone. A pipeline that names no fingerprint has no stages of this
    package, and its files are left alone too.

    Raises:
        RlhfError: a source is refused, or the files cannot be written.
    """
    follow_git(workspace)
    file = workspace / DVC_FILE
    text = file.read_text(encoding="utf-8")
    if FINGERPRINTS not in text:
        return
    updated = with_sources(text, load_params(workspace), workspace)
    if updated != text:
        atomic_write_text(file, updated)
    result = run_module(workspace, "rlhf_core", "fingerprint", "--workspace", str(workspace))
    if result.exit_code:
        raise RlhfError(result.error_line.removeprefix("rlhf: "))


def with_sources(dvc_yaml: str, params: Params, workspace: Path) -> str:
    """Return ``dvc_yaml`` with the stages that ``params`` need, and the files that they read.

    The dependencies of such a stage are its fingerprints, outputs of other stages, files of the
    workspace itself, and these.
    """
    yaml = YAML()  # keeps comments and style, so that only these lines change
    yaml.width, yaml.preserve_quotes = 4096, True
    yaml.indent(mapping=2, sequence=4, offset=2)
    document = yaml.load(dvc_yaml)
    changed = _fit_stages(document, params.left_out, yaml)
    stages = document.get("stages") or {}
    outputs: list[str] = []
    for stage in stages.values():
        outputs += entry_names(stage.get("outs"))
    for name, sources in _sources(params, workspace).items():
        stage = stages.get(name) or {}
        deps = list(entry_names(stage.get("deps")))
        if not any(dep.startswith(FINGERPRINTS) for dep in deps):
            continue
        wanted = []
        for dep in deps:
            if dep.startswith(FINGERPRINTS) or dep in outputs:
                wanted.append(dep)
        wanted += OF_WORKSPACE.get(name, [])
        for path in _dependencies(sources, workspace, outputs):
            if path not in wanted:
                wanted.append(path)
        if wanted != deps:
            changed = True
            stage["deps"][:] = wanted
    if not changed:
        return dvc_yaml
    stream = io.StringIO()
    yaml.dump(document, stream)
    return stream.getvalue()


# The stages that a workspace may do without, by its settings.
OPTIONAL = ("gate-sft", "reward", "referee", "judge", "gate-reward")
CURVES = "plots/curves/{}.csv"


def _fit_stages(document: Any, left_out: Collection[str], yaml: YAML) -> bool:
    """Take ``left_out`` stages from dvc.yaml and bring others back; return whether there are any.

    What they write goes from the dependencies and plots of other stages, or comes back there.
    """
    stages = document.get("stages") or {}
    if "ppo" not in stages:
        return False  # no pipeline of this recipe
    surplus = [name for name in OPTIONAL if name in stages and name in left_out]
    written = _written(stages[name] for name in surplus)
    for name in surplus:
        del stages[name]
    curves = {CURVES.format(name) for name in surplus}
    plots = document.get("plots") or []
    for number in reversed(range(len(plots))):
        for about in plots[number].values():
            if isinstance(about.get("y"), dict) and curves.issuperset(about["y"]):
                del plots[number]
                break
    for stage in stages.values():
        if surplus and "deps" in stage:
            kept = [dep for dep in stage["deps"] if written.isdisjoint(entry_names([dep]))]
            stage["deps"][:] = kept
    missing = [name for name in OPTIONAL if name not in stages and name not in left_out]
    if not missing:
        return bool(surplus)
    recipe = yaml.load((recipe_folder() / DVC_FILE).read_text(encoding="utf-8"))["stages"]
    for name in missing:
        stages[name] = recipe[name]
    returned = _written(recipe[name] for name in missing)
    for name, stage in recipe.items():
        if name not in stages or name in missing:
            continue
        known = [*entry_names(stages[name].get("deps"))]
        for dep in entry_names(stage["deps"]):
            if dep in returned and dep not in known:
                stages[name]["deps"].append(dep)
    return True


def _written(stages: Iterable[Any]) -> set[str]:
    written: set[str] = set()
    for stage in stages:
        for key in ("outs", "metrics", "plots"):
            written.update(entry_names(stage.get(key)))
    return written


def entry_names(entries: Any) -> Iterator[str]:
    """The paths in a list of dvc.yaml, whose entries may have options."""
    for entry in entries or []:
        if isinstance(entry, str):
            yield entry
        else:
            yield from entry


def _sources(params: Params, workspace: Path) -> Mapping[str, list[str]]:
    """Return what each stage reads from outside the pipeline, as params.yaml spells it."""
    asked: list[str] = []
    for patterns in params.evaluate.untracked_files.values():
        asked += patterns
    return {
        "collect": list(collected_paths(params.collect, workspace)),
        "validate": [source.path for source in params.validate_.evaluation_files],
        "evaluate": asked,
    }


def _dependencies(sources: list[str], workspace: Path, outputs: list[str]) -> list[str]:
    """Return what DVC is to hash: of a pattern its folder, in which new files may match.

    The single files stand for a folder that holds outputs of the pipeline, which would depend on
    themselves. What is not there is left to the stage that reads it.
    """
    dependencies: dict[str, None] = {}
    for source in sources:
        if is_elsewhere(source):
            continue
        paths = matching_files(source, workspace)
        folder = _folder(source, workspace)
        if paths and folder is not None and not _holds_outputs(folder, workspace, outputs):
            paths = [folder]
        for path in paths:
            dependencies[_spelled(path, workspace)] = None
    return list(dependencies)


def _folder(source: str, workspace: Path) -> Path | None:
    """Return the folder that a source names, also before its first wildcard; None for a file."""
    path = workspace / Path(os.path.expanduser(source))
    if path.is_file():
        return None
    while not path.is_dir() and any(sign in str(path) for sign in WILD):
        path = path.parent
    return path if path.is_dir() else None


def _holds_outputs(folder: Path, workspace: Path, outputs: list[str]) -> bool:
    inside = Path(os.path.normpath(folder))
    if workspace.is_relative_to(inside):
        return True
    for output in outputs:
        path = Path(os.path.normpath(workspace / output))
        if path.is_relative_to(inside) or inside.is_relative_to(path):
            return True
    return False


def _spelled(path: Path, workspace: Path) -> str:
    """Return a path relative to the workspace; one that lies elsewhere stays absolute if it is."""
    normal = os.path.normpath(path)
    relative = os.path.relpath(normal, workspace)
    return relative if not relative.startswith("../../../..") else normal
