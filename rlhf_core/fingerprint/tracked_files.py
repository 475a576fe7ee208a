"""Files outside the package that results depend on, written down by path and hash so that DVC sees
a change.

Data files, the starting model, and what reward sources read: model folders and a function's code.
What it cannot see: a hub id without a fixed ``revision``, what a scorer behind HTTP does, and data
that a function reads. A user's module
or a heavy library is never imported here: it runs at every ``dvc repro``.
"""

from __future__ import annotations

import ast
import glob
import hashlib
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

from rlhf_core.config.evaluation import EvaluateConfig, VerifiableConfig
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
from rlhf_core.fingerprint.stages import FOLDER
from rlhf_core.plugins import plugin_line
from rlhf_core.storage.data_files import expand, expand_url, is_url, spelled, url_checksum
from rlhf_core.storage.files import FileHashes, atomic_write_text, sha256_file

SOURCES_FILE = f"{FOLDER}/sources.txt"


def write_sources(
    workspace: Path, sources: Iterable[str], name: str = "sources", notes: Iterable[str] = ()
) -> None:
    """Refresh ``.fingerprints/NAME.txt`` with :func:`describe_sources`, so that DVC sees a
    change.
    """
    path = workspace / FOLDER / f"{name}.txt"
    text = describe_sources(workspace, sources, name, notes)
    if not path.exists() or path.read_text() != text:
        atomic_write_text(path, text)


def describe_sources(
    workspace: Path, sources: Iterable[str], name: str = "sources", notes: Iterable[str] = ()
) -> str:
    """Return a line for every source, and below it one with path and content hash of each of its
    files.

    Hashes are remembered by size, times and inode in ``.rlhf/NAME.json``. A URL counts by the
    checksum that its store gives without a download, a hub id by its name. ``notes`` are lines that
    come first.
    """
    hashes = FileHashes(workspace / ".rlhf" / f"{name}.json")
    lines = [*notes]
    for source in sources:
        lines.append(source)
        files: list[Path] = []
        with suppress(
            DataError
        ):  # what matches nothing or cannot be looked up is for the stage that reads it to report
            if is_url(source):
                lines += [f"  {url} {url_checksum(url)}" for url in expand_url(source, "")]
            elif not source.startswith("hub:"):
                files = expand(source, workspace)
        lines += [f"  {spelled(file, source, workspace)} {hashes.of(file)}" for file in files]
    hashes.save()
    return "\n".join(lines) + "\n"


STARTING_MODEL = "starting_model"
STARTING_MODEL_FILE = f"{FOLDER}/{STARTING_MODEL}.txt"
TOKENIZER_FILES = ("*.json", "*.jinja", "*.model", "*.txt")


def write_starting_model(workspace: Path, source: str) -> None:
    """Refresh ``.fingerprints/starting_model.txt``.

    Args:
        source: ``base.source``. A folder counts by its files, a GGUF file by itself; a hub id and
            ``scratch`` by their names, which params.yaml holds.
    """
    write_sources(workspace, _patterns(workspace, source, ("**",)), STARTING_MODEL)


def tokenizer_patterns(workspace: Path, source: str | None) -> list[str]:
    """Return the patterns of the files that ``validate.tokenizer`` reads: of a folder all but the
    weights.
    """
    return _patterns(workspace, source, TOKENIZER_FILES) if source else []


def _patterns(workspace: Path, source: str, inside: Sequence[str]) -> list[str]:
    path = Path(os.path.expanduser(source))
    name = glob.escape(str(path))
    if (workspace / path).is_dir():
        return [f"{name}/{pattern}" for pattern in inside]
    return [name] if (workspace / path).is_file() else []


REWARD_SOURCES = "reward_sources"
REWARD_SOURCES_FILE = f"{FOLDER}/{REWARD_SOURCES}.txt"


def write_tracked_files(workspace: Path, sources: RewardSources) -> None:
    """Refresh ``.fingerprints/reward_sources.txt``; the own reward model is left to DVC, which
    makes it.
    """
    write_sources(
        workspace,
        folder_patterns(workspace, sources),
        REWARD_SOURCES,
        code_lines(workspace, sources),
    )


def write_evaluation_inputs(workspace: Path, config: EvaluateConfig) -> None:
    """Refresh ``.fingerprints/verifiable.txt``: files, functions and plugins of ``evaluate``."""
    code = code_lines(workspace, verifiable_functions(config.verifiable))
    code += [plugin_line(group, name) for group, name in config.plugins]
    patterns = [pattern for kind in config.untracked_files.values() for pattern in kind]
    write_sources(workspace, patterns, "verifiable", code)


def verifiable_functions(config: VerifiableConfig | None) -> tuple[FunctionSource, ...]:
    """The functions of ``evaluate.verifiable``, each once."""
    return (
        tuple(FunctionSource(target=target) for target in sorted(set(config.functions.values())))
        if config
        else ()
    )


def folder_patterns(workspace: Path, sources: RewardSources) -> list[str]:
    """A pattern for the files of each local model folder, as ``write_sources`` takes it."""
    own = (workspace / OWN_MODEL).resolve()
    places = [
        Path(os.path.expanduser(folder)) for source in sources for folder in model_folders(source)
    ]
    return [
        f"{glob.escape(str(p))}/**"
        for p in places
        if (workspace / p).is_dir() and (workspace / p).resolve() != own
    ]


def model_folders(source: RewardSource) -> tuple[str, ...]:
    """The model folders that a source names; that of a classifier may be a hub id."""
    if isinstance(source, EnsembleSource):
        return source.paths
    if isinstance(source, ModelSource):
        return (source.path,)
    return (source.model,) if isinstance(source, ClassifierSource) else ()


def missing_function(target: str, workspace: Path) -> str:
    """Say what of ``package.module:function`` is not there, as far as files tell; empty where
    nothing is missing.
    """
    module, _, name = target.partition(":")
    if _spec(module, workspace) is None:
        return f"there is no module {module.partition('.')[0]}: it must be installed, on PYTHONPATH or in {workspace}"
    root = _root(module, workspace)
    file = root and _file(root, module)
    if file and not re.search(
        rf"\b{name}\b|import \*|__getattr__", file.read_text(encoding="utf-8", errors="replace")
    ):
        return f"{file} has no {name}"
    return ""


def function_files(workspace: Path, sources: RewardSources) -> list[str]:
    """Module files in the workspace that functions reach, relative to it: another host needs them
    to call the same.
    """
    reached = (
        file
        for source in sources
        if isinstance(source, FunctionSource)
        for _, file in _reached(source.target.split(":")[0], workspace)
    )
    root = workspace.resolve()
    inside = {file.resolve() for file in reached if file.resolve().is_relative_to(root)}
    return sorted(file.relative_to(root).as_posix() for file in inside)


def code_lines(workspace: Path, sources: RewardSources) -> list[str]:
    """For each function: its target, and a digest of each module file that its code reaches
    (comments do not count).

    Imports are followed inside the folder that the module lies in; of an installed package only the
    module itself.
    """
    lines = []
    for source in sources:
        if isinstance(source, FunctionSource):
            lines.append(source.target)
            lines += [
                f"  {name} {_digest(file)}"
                for name, file in _reached(source.target.split(":")[0], workspace)
            ]
    return lines


def _reached(module: str, workspace: Path) -> list[tuple[str, Path]]:
    root = _root(module, workspace)
    if root is None:
        return []
    installed = root in {Path(path) for path in sysconfig.get_paths().values()}
    files: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        file = _file(root, name)
        if file is not None and name not in files:
            files[name] = file
            waiting += [] if installed else _imported(name, file)
    return sorted(files.items())


def _spec(module: str, workspace: Path) -> ModuleSpec | None:
    """How the module, or the package around it, would be found."""
    top = module.partition(".")[0]
    with suppress(ImportError, ValueError):
        return find_spec(top) or PathFinder.find_spec(top, [str(workspace)])
    return None


def _root(module: str, workspace: Path) -> Path | None:
    """The folder that ``module`` is imported from: an installed or PYTHONPATH one, else the
    workspace.
    """
    spec = _spec(module, workspace)
    origins = (
        [*(spec.submodule_search_locations or ()), *([spec.origin] if spec.origin else [])]
        if spec
        else []
    )
    return next(
        (root for origin in origins for root in Path(origin).parents if _file(root, module)), None
    )


def _file(root: Path, module: str) -> Path | None:
    base = root.joinpath(*module.split("."))
    return next(
        (path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None
    )


def _imported(module: str, file: Path) -> Iterator[str]:
    """Names that may be modules: what is imported anywhere, from where, and the packages around
    it.
    """
    yield from packages_of(module)
    try:
        source = Module(module, file)
    except (
        SyntaxError,
        ValueError,
        ImportError,
    ):  # the last of a relative import that leads nowhere
        return
    for statement in imports_in(source.tree):
        for target in targets_executed(source, statement):
            yield from packages_of(
                f"{target.module}.{target.name}" if target.name else target.module
            )


def _digest(file: Path) -> str:
    """Hash of what the code does; of the bytes where it is not python, which the stage itself will
    refuse.
    """
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return sha256_file(file)
    drop_docstrings(tree)
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()
