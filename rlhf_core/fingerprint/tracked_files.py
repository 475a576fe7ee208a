"""Files outside the package that results depend on, by path and hash, so that DVC sees a change.

These are data files, the starting model, and what reward sources read: model folders and a
function's code. A hub id without a fixed ``revision``, what a scorer behind HTTP does, and data
that a function reads cannot be seen. A user's module or a heavy library is never imported here,
because this runs at every ``dvc repro``.
"""

from __future__ import annotations

import ast
import glob
import hashlib
import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from itertools import starmap
from pathlib import Path

from rlhf_core.config.evaluation import EvaluateConfig, VerifiableConfig
from rlhf_core.config.ppo import RolloutConfig
from rlhf_core.config.reward_sources import (
    OWN_MODEL,
    ClassifierSource,
    EnsembleSource,
    FunctionSource,
    ModelSource,
    RewardSource,
    RewardSources,
)
from rlhf_core.errors import DataError
from rlhf_core.fingerprint.modules import (
    Module,
    drop_docstrings,
    imports_in,
    packages_of,
    targets_executed,
)
from rlhf_core.fingerprint.reach import NO_DATA
from rlhf_core.fingerprint.stages import FOLDER
from rlhf_core.plugins import model_plugins, origin, plugins_of
from rlhf_core.storage.data_files import expand, expand_url, is_url, spelled, url_checksum
from rlhf_core.storage.files import FileHashes, atomic_write_text, sha256_file

SOURCES_FILE = f"{FOLDER}/sources.txt"


def write_sources(
    workspace: Path, sources: Iterable[str], name: str = "sources", notes: Iterable[str] = ()
) -> None:
    """Refresh ``.fingerprints/NAME.txt`` with :func:`describe_sources`."""
    path = workspace / FOLDER / f"{name}.txt"
    text = describe_sources(workspace, sources, name, notes)
    if not path.exists() or path.read_text() != text:
        atomic_write_text(path, text)


def describe_sources(
    workspace: Path, sources: Iterable[str], name: str = "sources", notes: Iterable[str] = ()
) -> str:
    """Return a line for every source, and below it one with path and hash of each of its files.

    Hashes are remembered by size, times and inode in ``.rlhf/NAME.json``. A URL counts by the
    checksum that its store gives without a download, a hub id by its name. ``notes`` are lines that
    come first.
    """
    hashes = FileHashes(workspace / ".rlhf" / f"{name}.json")
    lines = [*notes]
    for source in sources:
        lines.append(source)
        files: list[Path] = []
        # The stage that reads a source reports that it matches nothing or cannot be looked up.
        with suppress(DataError):
            if is_url(source):
                lines += [f"  {url} {url_checksum(url)}" for url in expand_url(source, "")]
            elif not source.startswith("hub:"):
                files = expand(source, workspace)
        lines += [f"  {spelled(file, source, workspace)} {hashes.of(file)}" for file in files]
    hashes.save()
    return "\n".join(lines) + "\n"


STARTING_MODEL = "starting_model"
STARTING_MODEL_FILE = f"{FOLDER}/{STARTING_MODEL}.txt"
TOKENIZER_FILES = (
    "*.json", "*.jinja", "*.model", "*.spm", "*.txt", "*.codes", "*.tokenizer", "additional_chat_templates/*"
)  # fmt: skip


def write_starting_model(workspace: Path, source: str) -> None:
    """Refresh ``.fingerprints/starting_model.txt``.

    Args:
        source: ``base.source``. A folder counts by its files, a GGUF file by itself; a hub id and
            ``scratch`` by their names, which params.yaml holds.
    """
    patterns = _patterns(workspace, source, ("**",))
    notes = starmap(plugin_line, model_plugins(source))
    write_sources(workspace, patterns, STARTING_MODEL, notes)


def tokenizer_patterns(workspace: Path, source: str | None) -> list[str]:
    """Return the patterns of the files that ``validate.tokenizer`` reads, without weights."""
    return _patterns(workspace, source, TOKENIZER_FILES) if source else []


def _patterns(workspace: Path, source: str, inside: Sequence[str]) -> list[str]:
    """Return patterns of the files of ``source``, of a folder those ``inside``."""
    path = Path(os.path.expanduser(source))
    place = workspace / path
    name = glob.escape(str(path))
    if place.is_dir():
        return [f"{name}/{pattern}" for pattern in inside]
    if place.is_file():
        return [name]
    return []


REWARD_SOURCES = "reward_sources"
REWARD_SOURCES_FILE = f"{FOLDER}/{REWARD_SOURCES}.txt"


def write_tracked_files(workspace: Path, rollout: RolloutConfig) -> None:
    """Refresh ``.fingerprints/reward_sources.txt``: what rewards, and plugins that sample.

    The own reward model is an output of DVC, which sees its changes.
    """
    sources = rollout.reward.sources
    code = code_lines(workspace, sources)
    code += starmap(plugin_line, rollout.plugins)
    write_sources(workspace, folder_patterns(workspace, sources), REWARD_SOURCES, code)


def write_evaluation_inputs(workspace: Path, config: EvaluateConfig) -> None:
    """Refresh ``.fingerprints/verifiable.txt``: files, functions and plugins of ``evaluate``."""
    code = code_lines(workspace, verifiable_functions(config.verifiable))
    code += starmap(plugin_line, config.plugins)
    patterns: list[str] = []
    for of_setting in config.untracked_files.values():
        patterns += of_setting
    write_sources(workspace, patterns, "verifiable", code)


def verifiable_functions(config: VerifiableConfig | None) -> tuple[FunctionSource, ...]:
    """Return the functions of ``evaluate.verifiable``, each once."""
    if config is None:
        return ()
    targets = sorted(set(config.functions.values()))
    return tuple(FunctionSource(target=target) for target in targets)


def folder_patterns(workspace: Path, sources: RewardSources) -> list[str]:
    """Return a pattern for the files of each local model folder, for ``write_sources``."""
    own = (workspace / OWN_MODEL).resolve()
    patterns = []
    for source in sources:
        for folder in model_folders(source):
            place = workspace / os.path.expanduser(folder)
            if place.is_dir() and place.resolve() != own:
                patterns += _patterns(workspace, folder, ("**",))
    return patterns


def model_folders(source: RewardSource) -> tuple[str, ...]:
    """Return the model folders that a source names; that of a classifier may be a hub id."""
    if isinstance(source, EnsembleSource):
        return source.paths
    if isinstance(source, ModelSource):
        return (source.path,)
    if isinstance(source, ClassifierSource):
        return (source.model,)
    return ()


def missing_function(target: str, workspace: Path) -> str:
    """Say what of ``package.module:function`` is missing, as far as files tell, if anything."""
    module, _, name = target.partition(":")
    if _spec(module, workspace) is None:
        return f"there is no module {module.partition('.')[0]}: it must be installed, on PYTHONPATH or in {workspace}"
    root = _root(module, workspace)
    file = root and _file(root, module)
    if not file:
        return ""
    source = file.read_text(encoding="utf-8", errors="replace")
    if re.search(rf"\b{name}\b|import \*|__getattr__", source):
        return ""
    return f"{file} has no {name}"


def function_files(workspace: Path, sources: RewardSources) -> list[str]:
    """Return the module files in the workspace that functions reach, relative to it.

    Another host needs them to call the same functions.
    """
    root = workspace.resolve()
    inside = set()
    for source in sources:
        if not isinstance(source, FunctionSource):
            continue
        for file in _of_function(source, workspace).values():
            resolved = file.resolve()
            if resolved.is_relative_to(root):
                inside.add(resolved.relative_to(root).as_posix())
    return sorted(inside)


def code_lines(workspace: Path, sources: RewardSources) -> list[str]:
    """Return the target of each function, and a digest of each module that its code reaches.

    Comments do not count. Imports are followed inside the folder that the module lies in; of an
    installed package only the module itself counts.
    """
    lines = []
    for source in sources:
        if not isinstance(source, FunctionSource):
            continue
        lines.append(source.target)
        modules = _of_function(source, workspace)
        for name in sorted(modules):
            lines.append(f"  {name} {_digest(modules[name])}")
    return lines


def plugin_line(group: str, name: str) -> str:
    """Describe a plugin, without importing it, in a line that changes with its version and code.

    Comments do not count. Imports are followed inside the package of its module; data files, such
    as a template, count where they have the name of a module beside them.
    """
    entries = plugins_of(group).get(name, ())
    if not entries:
        return f"{group} {name}: not installed"
    entry = entries[0]
    version = ""
    if entry.dist is not None:
        version = entry.dist.version
    package = entry.module.partition(".")[0]
    root = _root(entry.module, Path())
    files: dict[str, Path] = {}
    if root is not None:
        files = _reached(entry.module, root, lambda name: name.partition(".")[0] == package)
    digest = hashlib.sha256()
    for _, file in sorted(files.items()):
        digest.update(_digest(file).encode())
        for beside in sorted(file.parent.glob(f"{file.stem}.*")):
            if beside != file and beside.suffix not in NO_DATA:
                digest.update(beside.read_bytes())
    code = digest.hexdigest() if files else "unknown"
    return f"{group} {name}: {origin(entry)} {version}, {entry.value}, code {code}"


def _of_function(function: FunctionSource, workspace: Path) -> dict[str, Path]:
    """Return the modules that a function's code reaches, and their files."""
    module = function.target.partition(":")[0]
    root = _root(module, workspace)
    if root is None:
        return {}
    installed_folders = map(Path, sysconfig.get_paths().values())
    is_installed = root in installed_folders
    return _reached(module, root, lambda name: not is_installed)


def _reached(module: str, root: Path, follows: Callable[[str], bool]) -> dict[str, Path]:
    """Return a module of the folder ``root`` and those that its imports lead to, with their files.

    ``follows`` says of a module's name whether imports of it are followed.
    """
    files: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        file = _file(root, name)
        if file is not None and name not in files:
            files[name] = file
            waiting += filter(follows, _imported(name, file))
    return files


def _spec(module: str, workspace: Path) -> ModuleSpec | None:
    """Return how the module, or the package around it, would be found."""
    top = module.partition(".")[0]
    with suppress(ImportError, ValueError):
        spec = find_spec(top)
        if spec is None:
            spec = PathFinder.find_spec(top, [str(workspace)])
        return spec
    return None


def _root(module: str, workspace: Path) -> Path | None:
    """Return the folder that ``module`` is imported from, the workspace after all others."""
    spec = _spec(module, workspace)
    if spec is None:
        return None
    origins = list(spec.submodule_search_locations or ())
    if spec.origin:
        origins.append(spec.origin)
    for place in origins:
        for root in Path(place).parents:
            if _file(root, module):
                return root
    return None


def _file(root: Path, module: str) -> Path | None:
    base = root.joinpath(*module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


def _imported(module: str, file: Path) -> Iterator[str]:
    """Yield names that may be modules: what a file imports anywhere, and the packages around it."""
    yield from packages_of(module)
    try:
        source = Module(module, file)
    except (SyntaxError, ValueError, ImportError):  # the last: a relative import leads nowhere
        return
    for statement in imports_in(source.tree):
        for target in targets_executed(source, statement):
            name = f"{target.module}.{target.name}" if target.name else target.module
            yield from packages_of(name)


def _digest(file: Path) -> str:
    """Return a hash of what the code does, or of the bytes where it is not Python.

    The stage itself refuses the latter.
    """
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return sha256_file(file)
    drop_docstrings(tree)
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()
