"""The partial state of a training run: whole folders, verified by hash on load, the newest sound one wins.

A checkpoint is ``step-000123/`` with ``state.safetensors``, ``meta.json`` and, written last, ``manifest.json`` with the
sha256 of the other two. The folder appears under its name only when complete.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from rlhf_core import distributed
from rlhf_core.errors import CheckpointError
from rlhf_core.files import sha256_file

logger = logging.getLogger(__name__)

STATE, META, MANIFEST = "state.safetensors", "meta.json", "manifest.json"
NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True)
class Checkpoint:
    """``step`` optimiser steps are done. ``tensors`` and ``meta`` are what was given to :func:`save`.

    Of several ranks only the first has the tensors.
    """

    step: int
    tensors: dict[str, Tensor]
    meta: dict[str, Any]
    path: Path


def save(
    directory: Path,
    step: int,
    tensors: dict[str, Tensor],
    meta: dict[str, Any],
    keep: int,
    keep_from: int | None = None,
) -> Path:
    """Write the state after ``step`` steps and drop all but the newest ``keep`` and those from ``keep_from`` on.

    ``meta`` is JSON with finite numbers. A checkpoint of the same or a later step is of a run that was abandoned (this
    one resumed from before it) and goes. Returns the new folder.
    """
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    target = directory / f"step-{step:06d}"
    building = directory / f".building-{step:06d}"
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir()
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, building / STATE)
    _write(building / META, {"step": step, "meta": meta})
    _flush(building / STATE)
    _write(building / MANIFEST, {name: sha256_file(building / name) for name in (STATE, META)})
    for later in [path for number, path in _saved(directory) if number >= step]:
        shutil.rmtree(later)
    os.replace(building, target)
    _flush(directory)
    for number, path in _saved(directory)[:-keep]:
        if keep_from is None or number < keep_from:
            shutil.rmtree(path)
    return target


def saved_metas(directory: Path) -> dict[int, dict[str, Any]]:
    """``meta`` of every checkpoint that can be read, by step; broken ones are left to :func:`load_latest`."""
    metas = {}
    for step, path in _saved(directory):
        try:
            metas[step] = json.loads((path / META).read_text(encoding="utf-8"))["meta"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return metas


def drop(directory: Path, step: int) -> None:
    """Remove the checkpoint of ``step``, in one move as far as readers can tell."""
    path = directory / f"step-{step:06d}"
    aside = directory / f".dropped-{step:06d}"
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(path, aside)
    shutil.rmtree(aside)


def load_latest(directory: Path) -> Checkpoint | None:
    """The newest checkpoint whose hashes hold; ``None`` when there is none at all. The first rank's folder counts.

    A broken one is reported, moved aside (``broken-step-…``) and the one before it is tried. ``CheckpointError`` when
    all are broken: starting over silently would hide a failing disk.
    """
    found = _newest_sound(directory) if distributed.is_first() else None
    header = distributed.from_first([found.step, found.meta] if found else None)
    if header is None or found is not None:
        return found
    return Checkpoint(header[0], {}, header[1], directory)


def _newest_sound(directory: Path) -> Checkpoint | None:
    problems = []
    for _, path in reversed(_saved(directory)):
        try:
            return _load(path)
        except CheckpointError as error:
            problems.append(str(error))
            logger.warning("%s; falling back to the checkpoint before it", error)
            _move_aside(path)
    if problems:
        raise CheckpointError(
            f"no checkpoint in {directory} is usable ({'; '.join(problems)}); delete the folder to start over"
        )
    return None


def _load(path: Path) -> Checkpoint:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        for name in (STATE, META):
            if sha256_file(path / name) != manifest[name]:
                raise CheckpointError(f"checkpoint {path} is broken: {name} does not have the sha256 it was saved with")
        content = json.loads((path / META).read_text(encoding="utf-8"))
        return Checkpoint(int(content["step"]), load_file(path / STATE), content["meta"], path)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {path} is broken: {type(error).__name__}: {error}") from error


def _saved(directory: Path) -> list[tuple[int, Path]]:
    """Checkpoint folders by step, oldest first."""
    if not directory.is_dir():
        return []
    named = [(match, path) for path in directory.iterdir() if (match := NAME.fullmatch(path.name))]
    return sorted((int(match[1]), path) for match, path in named)


def _move_aside(path: Path) -> None:
    aside = path.with_name(f"broken-{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(path, aside)


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, allow_nan=False), encoding="utf-8")
    _flush(path)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
