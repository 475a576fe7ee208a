"""Checkpoints of a training run: folders that are written atomically and verified by hash on load.

A checkpoint is ``step-000123/`` with ``state.safetensors``, ``meta.json`` and, written last, ``manifest.json`` with the
sha256 of the other two. The folder gets its name only when it is complete. A run resumes from the newest valid one.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhf_core import distributed
from rlhf_core.errors import CheckpointError
from rlhf_core.files import sha256_file
from rlhf_core.training.checkpoints.store import CheckpointStore

logger = logging.getLogger(__name__)

STATE, META, MANIFEST = "state.safetensors", "meta.json", "manifest.json"
BUILDING = ".building-"
NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after ``step`` optimiser steps.

    Attributes:
        tensors: What was given to :func:`save`; empty on non-zero ranks.
        meta: What was given to :func:`save`.
        path: The checkpoint's folder.
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
    spare: Collection[int] = (),
    store: CheckpointStore | None = None,
) -> Path:
    """Write the state after ``step`` steps and delete older checkpoints.

    Checkpoints of the same or a later step are deleted too: they are of an abandoned run, from before which this one
    resumed.

    Args:
        directory: Folder of the run's checkpoints.
        meta: JSON with finite numbers.
        keep: The newest checkpoints that stay.
        keep_from: All checkpoints from this step on stay.
        spare: Steps whose checkpoints are deleted in any case.
        store: Receives a copy of the whole partial state.

    Returns:
        The new folder.

    Raises:
        CheckpointError: It cannot be written (a full disk); the others stay as they are.
    """
    target = directory / f"step-{step:06d}"
    building = directory / f"{BUILDING}{step:06d}"
    try:
        _build(building, step, tensors, meta)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(building, ignore_errors=True)
        raise CheckpointError(_unwritten(directory, step, error)) from error
    for later in [path for number, path in _saved(directory) if number >= step]:
        shutil.rmtree(later)
    os.replace(building, target)
    _flush(directory)
    for number in spare:
        shutil.rmtree(directory / f"step-{number:06d}", ignore_errors=True)
    for number, path in _saved(directory)[:-keep]:
        if keep_from is None or number < keep_from:
            shutil.rmtree(path)
    if store is not None:
        store.publish(directory.parent, step, keep)
    return target


def _build(building: Path, step: int, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    building.parent.mkdir(parents=True, exist_ok=True)
    for left in building.parent.glob(f"{BUILDING}*"):
        shutil.rmtree(left, ignore_errors=True)
    building.mkdir()
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, building / STATE)
    _write(building / META, {"step": step, "meta": meta})
    _flush(building / STATE)
    _write(building / MANIFEST, {name: sha256_file(building / name) for name in (STATE, META)})


def _unwritten(directory: Path, step: int, error: Exception) -> str:
    full = "No space left" in str(error)
    before = [number for number, _ in _saved(directory) if number < step]
    where = f"goes on from step {before[-1]}" if before else "starts over"
    return (
        f"the checkpoint of step {step} could not be written to {directory}: "
        f"{'no space left on the device' if full else error}; "
        f"{'make room' if full else 'resolve that'} and run the stage again: it {where}"
    )


def saved_metas(directory: Path) -> dict[int, dict[str, Any]]:
    """``meta`` of every readable checkpoint, by step; damaged ones are left to :func:`load_latest`."""
    metas = {}
    for step, path in _saved(directory):
        try:
            metas[step] = json.loads((path / META).read_text(encoding="utf-8"))["meta"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return metas


def sound_step(directory: Path) -> int:
    """The step of the newest checkpoint with valid hashes; -1 when there is none."""
    for step, path in reversed(_saved(directory)):
        try:
            _verify(path)
        except CheckpointError:
            continue
        return step
    return -1


def drop(directory: Path, step: int) -> None:
    """Delete the checkpoint of ``step``; readers see all of it or nothing."""
    path = directory / f"step-{step:06d}"
    aside = directory / f".dropped-{step:06d}"
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(path, aside)
    shutil.rmtree(aside)


def load_latest(directory: Path) -> Checkpoint | None:
    """Load the newest checkpoint with valid hashes from rank 0's folder; None when there is no checkpoint.

    A damaged one is reported and renamed (``broken-step-…``), and the one before it is tried.

    Raises:
        CheckpointError: All checkpoints are damaged; starting over silently would hide a failing disk.
    """
    loaded = _newest_valid(directory) if distributed.is_rank_zero() else None
    header = distributed.broadcast_from_rank0([loaded.step, loaded.meta] if loaded else None)
    if header is None or loaded is not None:
        return loaded
    return Checkpoint(header[0], {}, header[1], directory)


def _newest_valid(directory: Path) -> Checkpoint | None:
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


def _verify(path: Path) -> None:
    """``CheckpointError`` unless the files of checkpoint ``path`` have the hashes that they were saved with."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        for name in (STATE, META):
            if sha256_file(path / name) != manifest[name]:
                raise CheckpointError(f"checkpoint {path} is broken: {name} does not have the sha256 it was saved with")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _broken(path, error) from error


def _load(path: Path) -> Checkpoint:
    _verify(path)
    try:
        content = json.loads((path / META).read_text(encoding="utf-8"))
        return Checkpoint(int(content["step"]), load_file(path / STATE), content["meta"], path)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise _broken(path, error) from error


def _broken(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"checkpoint {path} is broken: {type(error).__name__}: {error}")


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
