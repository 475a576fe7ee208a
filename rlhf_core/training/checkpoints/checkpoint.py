"""Checkpoints of a training run on disk: their files, and reading them, verified by hash.

A checkpoint is ``step-000123/`` with a safetensors file of each rank that wrote it, such as
``state-00001-of-00002.safetensors``, or several where memory was short (``state-00001-of-00002-1.safetensors``),
``meta.json`` and, written last, ``manifest.json`` with the sha256 of all others.
The folder gets its name only when it is complete. A run resumes from the newest valid one, on any number of ranks.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from rlhf_core.errors import CheckpointError
from rlhf_core.runtime import distributed
from rlhf_core.storage.files import sha256_file
from rlhf_core.training.checkpoints.pieces import SavedTensors

logger = logging.getLogger(__name__)

META, MANIFEST = "meta.json", "manifest.json"
BUILDING = ".building-"
NAME = re.compile(r"step-(\d{6,})")
FILE_NAME = re.compile(r"[\w.-]+\.(?:safetensors|json)")


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after ``step`` optimiser steps.

    Attributes:
        tensors: What all ranks wrote.
        meta: What rank 0 wrote beside it, as JSON.
        path: The checkpoint's folder.
    """

    step: int
    tensors: SavedTensors
    meta: dict[str, Any]
    path: Path


def folder_of(directory: Path, step: int) -> Path:
    """The folder of the checkpoint of ``step``."""
    return directory / f"step-{step:06d}"


def state_file(rank: int, ranks: int, number: int = 0) -> str:
    """Name of a file that ``rank`` of ``ranks`` writes, the ``number``-th after its first."""
    return f"state-{rank + 1:05d}-of-{ranks:05d}{f'-{number}' if number else ''}.safetensors"


def saved_steps(directory: Path) -> list[int]:
    """Steps of the checkpoints in ``directory``, damaged ones among them, oldest first."""
    if not directory.is_dir():
        return []
    return sorted(int(match[1]) for path in directory.iterdir() if (match := NAME.fullmatch(path.name)))


def saved_metas(directory: Path) -> dict[int, dict[str, Any]]:
    """``meta`` of every readable checkpoint, by step; damaged ones are left to :func:`load_latest`."""
    metas = {}
    for step in saved_steps(directory):
        try:
            content = (folder_of(directory, step) / META).read_text(encoding="utf-8")
            metas[step] = json.loads(content)["meta"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return metas


def sound_step(directory: Path) -> int:
    """The step of the newest checkpoint with valid hashes; -1 when there is none."""
    for step in reversed(saved_steps(directory)):
        try:
            path = folder_of(directory, step)
            manifest = _manifest(path)
        except CheckpointError:
            continue
        if not any(_problem(path, name, digest) for name, digest in manifest.items()):
            return step
    return -1


def drop(directory: Path, step: int) -> None:
    """Delete the checkpoint of ``step``; readers see all of it or nothing."""
    aside = directory / f".dropped-{step:06d}"
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(folder_of(directory, step), aside)
    shutil.rmtree(aside)


def load_latest(directory: Path) -> Checkpoint | None:
    """Load the newest checkpoint with valid hashes; None when there is no checkpoint.

    A damaged one is reported and renamed (``broken-step-…``), and the one before it is tried. Every rank must call it
    with the same folder; the ranks divide the files to verify.

    Raises:
        CheckpointError: All checkpoints are damaged; starting over silently would hide a failing disk.
    """
    problems = []
    for step in reversed(distributed.broadcast_from_rank0(saved_steps(directory))):
        path = folder_of(directory, step)
        try:
            return verified(path)
        except CheckpointError as error:
            problems.append(str(error))
            if distributed.is_rank_zero():
                logger.warning("%s; falling back to the checkpoint before it", error)
                _move_aside(path)
    if problems:
        raise CheckpointError(
            f"no checkpoint in {directory} is usable ({'; '.join(problems)}); delete the folder to start over"
        )
    return None


def verified(path: Path) -> Checkpoint:
    """Read the checkpoint in folder ``path`` if all ranks find it sound; else ``CheckpointError`` on every rank."""
    manifest: dict[str, str] = {}
    content: Any = None
    problem = None
    if distributed.is_rank_zero():
        try:
            manifest = _manifest(path)
        except CheckpointError as error:
            problem = str(error)
    manifest, problem = distributed.broadcast_from_rank0([manifest, problem])
    if problem is None:
        mine = distributed.shard_for_rank(sorted(manifest.items()))
        problems = distributed.gather_items([_problem(path, name, digest) for name, digest in mine])
        problem = next((each for each in problems if each is not None), None)
    if problem is not None:
        raise CheckpointError(problem)
    try:
        content = json.loads((path / META).read_text(encoding="utf-8"))
        tensors = SavedTensors([path / name for name in sorted(manifest) if name.endswith(".safetensors")])
        return Checkpoint(int(content["step"]), tensors, content["meta"], path)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise _broken(path, error) from error


def _manifest(path: Path) -> dict[str, str]:
    """The hashes of a checkpoint's files by name; ``CheckpointError`` unless it is complete."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        names: Sequence[str] = [*manifest, META]
        if not all(FILE_NAME.fullmatch(name) and isinstance(manifest[name], str) for name in names):
            raise ValueError(f"{MANIFEST} does not name the files of a checkpoint")
        return dict(manifest)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _broken(path, error) from error


def _problem(path: Path, name: str, digest: str) -> str | None:
    """Why a file of checkpoint ``path`` cannot be used; None if it has the hash that it was saved with."""
    try:
        sound = sha256_file(path / name) == digest
    except OSError as error:
        return str(_broken(path, error))
    return None if sound else f"checkpoint {path} is broken: {name} does not have the sha256 it was saved with"


def _broken(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"checkpoint {path} is broken: {type(error).__name__}: {error}")


def _move_aside(path: Path) -> None:
    aside = path.with_name(f"broken-{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(path, aside)
