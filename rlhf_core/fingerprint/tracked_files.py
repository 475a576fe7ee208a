"""What reward sources read from disk, written down so that DVC sees a change: model folders and a function's code.

What it cannot see: a hub id without a fixed ``revision``, what a scorer behind HTTP does, and data that a function
reads. Nothing here imports a user's module or a heavy library: it runs at every ``dvc repro``.
"""

from __future__ import annotations

import ast
import glob
import hashlib
import sysconfig
from collections.abc import Iterator
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from rlhf_core.config.evaluation import EvaluateConfig, VerifiableConfig
from rlhf_core.config.reward_sources import (
    OWN_MODEL,
    ClassifierSource,
    EnsembleSource,
    FunctionSource,
    ModelSource,
    RewardSources,
)
from rlhf_core.fingerprint import bare_code, write_sources
from rlhf_core.fingerprint.modules import Module, imports_in, packages_of, targets_executed
from rlhf_core.storage.files import sha256_file

NAME = "reward_sources"
FILE = f".fingerprints/{NAME}.txt"


def write_tracked_files(workspace: Path, sources: RewardSources) -> None:
    """Refresh ``.fingerprints/reward_sources.txt``; the own reward model is left to DVC, which makes it."""
    write_sources(workspace, folder_patterns(workspace, sources), NAME, code_lines(workspace, sources))


def write_evaluation_inputs(workspace: Path, config: EvaluateConfig) -> None:
    """Refresh ``.fingerprints/verifiable.txt``: the files that ``evaluate`` names, and the code of its functions."""
    code = code_lines(workspace, verifiable_functions(config.verifiable))
    patterns = [pattern for kind in config.untracked_files.values() for pattern in kind]
    write_sources(workspace, patterns, "verifiable", code)


def verifiable_functions(config: VerifiableConfig | None) -> tuple[FunctionSource, ...]:
    """The functions of ``evaluate.verifiable``, each once."""
    return tuple(FunctionSource(target=target) for target in sorted(set(config.functions.values()))) if config else ()


def folder_patterns(workspace: Path, sources: RewardSources) -> list[str]:
    """A pattern for the files of each local model folder, as ``write_sources`` takes it."""
    folders: list[str] = []
    for source in sources:
        if isinstance(source, ModelSource):
            folders.append(source.path)
        elif isinstance(source, EnsembleSource):
            folders += source.paths
        elif isinstance(source, ClassifierSource):
            folders.append(source.model)
    own = (workspace / OWN_MODEL).resolve()
    places = [Path(folder).expanduser() for folder in folders]
    return [
        f"{glob.escape(str(p))}/**" for p in places if (workspace / p).is_dir() and (workspace / p).resolve() != own
    ]


def function_files(workspace: Path, sources: RewardSources) -> list[str]:
    """Module files in the workspace that functions reach, relative to it: another host needs them to call the same."""
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
    """For each function: its target, and a digest of each module file that its code reaches (comments do not count).

    Imports are followed inside the folder that the module lies in; of an installed package only the module itself.
    """
    lines = []
    for source in sources:
        if isinstance(source, FunctionSource):
            lines.append(source.target)
            lines += [f"  {name} {_digest(file)}" for name, file in _reached(source.target.split(":")[0], workspace)]
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


def _root(module: str, workspace: Path) -> Path | None:
    """The folder that ``module`` is imported from: an installed or PYTHONPATH one, else the workspace."""
    top = module.partition(".")[0]
    try:
        spec = find_spec(top) or PathFinder.find_spec(top, [str(workspace)])
    except (ImportError, ValueError):
        return None
    origins = [*(spec.submodule_search_locations or ()), *([spec.origin] if spec.origin else [])] if spec else []
    return next((root for origin in origins for root in Path(origin).parents if _file(root, module)), None)


def _file(root: Path, module: str) -> Path | None:
    base = root.joinpath(*module.split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


def _imported(module: str, file: Path) -> Iterator[str]:
    """Names that may be modules: what is imported anywhere, from where, and the packages around it."""
    yield from packages_of(module)
    try:
        source = Module(module, file)
    except (SyntaxError, ValueError, ImportError):  # the last of a relative import that leads nowhere
        return
    for statement in imports_in(source.tree):
        for target in targets_executed(source, statement):
            yield from packages_of(f"{target.module}.{target.name}" if target.name else target.module)


def _digest(file: Path) -> str:
    """Hash of what the code does; of the bytes where it is not python, which the stage itself will refuse."""
    try:
        return hashlib.sha256(bare_code(ast.parse(file.read_bytes()))).hexdigest()
    except (SyntaxError, ValueError):
        return sha256_file(file)
