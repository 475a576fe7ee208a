"""Code as a dependency: a hash of what a stage's code does, blind to comments, docstrings and layout."""

from __future__ import annotations

import ast
import glob
import hashlib
import json
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlhf_core.files import atomic_write_text, sha256_file

PACKAGE = "rlhf_core"
FOLDER = ".fingerprints"
# Reporting never changes a result, and neither do an interruption or the place of a checkpoint: a new message or a new
# progress bar must not cost a training run.
_NAMES = ("errors", "progress", "tracking", "preemption", "training.checkpoints.store", "training.checkpoints.location")
NEUTRAL = frozenset(f"{PACKAGE}.{name}" for name in _NAMES)


def stage_module(stage: str) -> str:
    """Module name of a stage: ``gate-reward`` lives in ``rlhf_core.stages.gate_reward``."""
    return f"{PACKAGE}.stages.{stage.replace('-', '_')}"


def package_root() -> Path:
    """Folder that holds the package."""
    spec = find_spec(PACKAGE)
    assert spec is not None and spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations))).parent


def fingerprint(stage: str) -> str:
    """Hex digest of the syntax trees of the stage's module and of all that it imports inside the package.

    Data files that lie beside a module of a package (templates) count by their bytes.
    """
    digest = hashlib.sha256()
    for module in sorted(_closure(stage_module(stage))):
        digest.update(f"{module}\0{_module_digest(module)}\n".encode())
    return digest.hexdigest()


def write_fingerprints(workspace: Path, stages: list[str]) -> None:
    """Refresh ``.fingerprints/STAGE.txt``; a file whose content would not change is left alone."""
    for stage in stages:
        path = workspace / FOLDER / f"{stage}.txt"
        text = fingerprint(stage) + "\n"
        if not path.exists() or path.read_text() != text:
            atomic_write_text(path, text)


def write_sources(workspace: Path, sources: Iterable[str], name: str = "sources", notes: Iterable[str] = ()) -> None:
    """Refresh ``.fingerprints/NAME.txt``: path and content hash of every source file, so that DVC sees a change.

    Hashes are remembered by size and modification time in ``.rlhf/NAME.json``. A hub id counts by its name. ``notes``
    are lines that come first.
    """
    memory = workspace / ".rlhf" / f"{name}.json"
    known: dict[str, list[Any]] = json.loads(memory.read_text()) if memory.exists() else {}
    fresh: dict[str, list[Any]] = {}
    lines = [*notes]
    for source in sources:
        files = [] if source.startswith("hub:") else sorted(glob.glob(str(workspace / source), recursive=True))
        lines.append(source)
        for file in (Path(f) for f in files if Path(f).is_file()):
            status = file.stat()
            mark = [status.st_size, status.st_mtime_ns]
            old = known.get(str(file))
            fresh[str(file)] = old if old and old[:2] == mark else [*mark, sha256_file(file)]
            lines.append(f"  {file.name} {fresh[str(file)][2]}")
    path = workspace / FOLDER / f"{name}.txt"
    text = "\n".join(lines) + "\n"
    if not path.exists() or path.read_text() != text:
        atomic_write_text(path, text)
    if fresh != known:
        atomic_write_text(memory, json.dumps(fresh, indent=1))


def _closure(start: str) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        module = waiting.pop()
        if module not in seen | NEUTRAL and _file_of(module) is not None:
            seen.add(module)
            waiting.extend(_imports(module))
    return seen


@cache
def _file_of(module: str) -> Path | None:
    base = package_root().joinpath(*module.split("."))
    for candidate in (base.with_suffix(".py"), base / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


@cache
def _tree(module: str) -> ast.Module:
    path = _file_of(module)
    assert path is not None
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def _imports(module: str) -> tuple[str, ...]:
    found: set[str] = set()
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    inside = {name for name in found if name == PACKAGE or name.startswith(f"{PACKAGE}.")}
    parents = {name.rsplit(".", n)[0] for name in inside for n in range(1, name.count(".") + 1)}
    return tuple(sorted(inside | parents))


@cache
def _module_digest(module: str) -> str:
    digest = hashlib.sha256(bare_code(_tree(module)))
    path = _file_of(module)
    assert path is not None
    if path.name == "__init__.py":
        for data in sorted(p for p in path.parent.iterdir() if p.is_file() and p.suffix in {".html", ".css", ".j2"}):
            digest.update(data.name.encode() + b"\0" + data.read_bytes())
    return digest.hexdigest()


def bare_code(tree: ast.Module) -> bytes:
    """What the code of a module does, without comments, docstrings and layout. The docstrings of ``tree`` go."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            _drop_docstring(node)
    return ast.dump(tree, include_attributes=False).encode()


def _drop_docstring(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    first = node.body[0] if node.body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        node.body = node.body[1:] or [ast.Pass()]
