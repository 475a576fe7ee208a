"""Checkpoints of a training run on disk.

Tensors are in pieces, written by each rank and read by any number of ranks. A background thread
writes copies of them, which are made in host memory, while training goes on.

A file of pieces is a safetensors file. A tensor that is whole has its own shape in it; a piece of
one is flat. The header says which elements it holds, in the form of torch's distributed
checkpoints, whose ``HuggingFaceStorageReader`` can read the files too, and the shape of the whole.

A checkpoint is ``step-000123/`` with a safetensors file of each rank that wrote it, such as
``state-00001-of-00002.safetensors``, or several where memory was short
(``state-00001-of-00002-1.safetensors``), ``meta.json`` and, written last, ``manifest.json`` with
the sha256 of all others. The folder gets its name only when it is complete. A run resumes from the
newest valid one, on any number of ranks.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlhf_core.errors import CheckpointError, is_exhausted
from rlhf_core.runtime import distributed
from rlhf_core.runtime import machine as host_memory
from rlhf_core.storage.files import remove_tree, sha256_file

logger = logging.getLogger(__name__)

META, MANIFEST = "meta.json", "manifest.json"
BUILDING = ".building-"
NAME = re.compile(r"step-(\d{6,})")
FILE_NAME = re.compile(r"[\w.-]+\.(?:safetensors|json)")
# torch.distributed.checkpoint._hf_utils.CUSTOM_METADATA_KEY. More than one key would be written in
# random order.
HEADER = "DCP_SHARDING_INFO"


@dataclass(frozen=True)
class Piece:
    """Consecutive elements of a tensor in row-major order.

    Attributes:
        values: The elements: flat, or in the tensor's shape if they are all of it.
        shape: Shape of the whole tensor.
        start: Index of the first element.
    """

    values: Tensor
    shape: tuple[int, ...]
    start: int = 0

    @classmethod
    def whole(cls, tensor: Tensor) -> Piece:
        """All elements of ``tensor``, which is not copied."""
        return cls(tensor.detach(), tuple(tensor.shape))

    @classmethod
    def flat(cls, values: Tensor, shape: Sequence[int], start: int) -> Piece:
        """The flat ``values`` from element ``start`` of a tensor of ``shape`` on."""
        whole = values.numel() == math.prod(shape)
        return cls(values.detach().view(shape) if whole else values.detach(), tuple(shape), start)

    @property
    def is_whole(self) -> bool:
        """Whether it has all elements of the tensor."""
        return tuple(self.values.shape) == self.shape


def pieces_of_rank(tensors: Mapping[str, Tensor]) -> dict[str, Piece]:
    """This rank's share of tensors that every rank holds: an equal part of each.

    All of them in one process.
    """
    ranks, rank = distributed.world_size(), distributed.rank()
    if ranks == 1:
        return {name: Piece.whole(tensor) for name, tensor in tensors.items()}
    pieces = {}
    for name, tensor in tensors.items():
        start, stop = (tensor.numel() * part // ranks for part in (rank, rank + 1))
        if start < stop:
            pieces[name] = Piece.flat(tensor.detach().reshape(-1)[start:stop], tensor.shape, start)
    return pieces


def write_pieces(path: Path, pieces: Mapping[str, Piece]) -> None:
    """Write contiguous CPU tensors, of which no two share elements, to a safetensors file.

    Nothing is copied.

    Raises:
        SafetensorError: It cannot be written.
    """
    header = {}
    for name, piece in pieces.items():
        offsets = [0] * len(piece.shape) if piece.is_whole else [piece.start]
        header[name] = {"saved_offsets": offsets, "shape": piece.shape}
    tensors = {name: piece.values for name, piece in pieces.items()}
    save_file(tensors, path, {HEADER: json.dumps(header)})


@dataclass(frozen=True)
class _StoredPiece:
    """A range of a tensor's elements, and where a file holds it."""

    path: Path
    file: Any
    key: str
    shape: tuple[int, ...]
    start: int
    stop: int

    def elements(self, start: int, stop: int) -> Tensor:
        if self.stop - self.start < math.prod(self.shape):
            part: Tensor = self.file.get_slice(self.key)[start - self.start : stop - self.start]
            return part
        whole: Tensor = self.file.get_tensor(self.key)
        return whole.view(-1)[start:stop]


class SavedTensors:
    """The tensors in some files of pieces. Elements are read when they are asked for.

    What is returned may share memory with a file: copy it before changing it.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        """Read the headers; ``SafetensorError`` or ``ValueError`` if one is damaged."""
        self._pieces: dict[str, list[_StoredPiece]] = {}
        for path in files:
            file: Any = safe_open(path, framework="pt")
            header = json.loads((file.metadata() or {}).get(HEADER, "{}"))
            for name in file.keys():  # noqa: SIM118 - no mapping
                stored = tuple(file.get_slice(name).get_shape())
                shape = tuple(header[name]["shape"]) if name in header else stored
                start = 0 if shape == stored else int(header[name]["saved_offsets"][0])
                piece = _StoredPiece(path, file, name, shape, start, start + math.prod(stored))
                self._pieces.setdefault(name, []).append(piece)

    def under(self, prefix: str) -> SavedTensors:
        """Those whose names begin with ``prefix``, which is taken off."""
        view = SavedTensors([])
        chosen = (name for name in self._pieces if name.startswith(prefix))
        view._pieces = {name.removeprefix(prefix): self._pieces[name] for name in chosen}
        return view

    @property
    def names(self) -> set[str]:
        """Names of the tensors."""
        return set(self._pieces)

    def whole(self, name: str) -> Tensor:
        """The whole tensor on the CPU; ``KeyError`` if there is none of that name."""
        shape = self._pieces[name][0].shape
        return self.read(name, 0, math.prod(shape)).view(shape)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements ``start`` to ``stop`` of a tensor in row-major order, flat, on the CPU.

        Raises:
            CheckpointError: Some of them are in no file.
        """
        parts, position = [], start
        for piece in sorted(self._pieces[name], key=lambda piece: piece.start):
            if piece.start <= position < piece.stop:
                end = min(stop, piece.stop)
                parts.append(piece.elements(position, end))
                position = end
        if position < stop:
            piece = self._pieces[name][0]
            raise CheckpointError(
                f"checkpoint {piece.path.parent} is incomplete: elements {position} to {stop} of {piece.key} are "
                "missing"
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)


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
    return sorted(
        int(match[1]) for path in directory.iterdir() if (match := NAME.fullmatch(path.name))
    )


def saved_metas(directory: Path) -> dict[int, dict[str, Any]]:
    """``meta`` of every readable checkpoint, by step.

    Damaged ones are left to :func:`load_latest`.
    """
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
        path = folder_of(directory, step)
        manifest, problem = _manifest(path)
        if not problem and not any(
            _problem(path, name, digest) for name, digest in manifest.items()
        ):
            return step
    return -1


def drop(directory: Path, step: int) -> None:
    """Delete the checkpoint of ``step``; readers see all of it or nothing."""
    remove_tree(folder_of(directory, step))


def load_latest(directory: Path) -> Checkpoint | None:
    """Load the newest checkpoint with valid hashes; None when there is no checkpoint.

    A damaged one is reported and, once an earlier one is found to be sound, renamed
    (``broken-step-…``). Every rank must call it with the same folder; the ranks divide the files to
    verify.

    Raises:
        CheckpointError: All checkpoints are damaged; starting over silently would hide a failing
            disk.
    """
    damaged: dict[Path, str] = {}
    for step in reversed(distributed.broadcast_from_rank0(saved_steps(directory))):
        path = folder_of(directory, step)
        try:
            found = verified(path)
        except CheckpointError as error:
            damaged[path] = str(error)
            continue
        if distributed.is_rank_zero():
            _put_aside(damaged)
        return found
    if damaged:
        # They keep their names: the next attempt must say the same, and not start over because it
        # sees none.
        raise CheckpointError(
            f"no checkpoint in {directory} is usable ({'; '.join(damaged.values())}); delete the folder to start over"
        )
    return None


def _put_aside(damaged: Mapping[Path, str]) -> None:
    """Rename damaged checkpoints, and say why."""
    for path, problem in damaged.items():
        logger.warning("%s; falling back to the checkpoint before it", problem)
        aside = path.with_name(f"broken-{path.name}")
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(path, aside)


def verified(path: Path) -> Checkpoint:
    """Read the checkpoint in folder ``path`` if all ranks find it sound.

    Else ``CheckpointError`` on every rank.
    """
    manifest, problem = distributed.broadcast_from_rank0(
        _manifest(path) if distributed.is_rank_zero() else ({}, "")
    )
    mine = distributed.shard_for_rank(sorted(manifest.items()))
    problems = [
        problem,
        *distributed.gather_items([_problem(path, name, digest) for name, digest in mine]),
    ]
    if any(problems):
        raise CheckpointError(next(filter(None, problems)))
    try:
        content = json.loads((path / META).read_text(encoding="utf-8"))
        tensors = SavedTensors(
            [path / name for name in sorted(manifest) if name.endswith(".safetensors")]
        )
        return Checkpoint(int(content["step"]), tensors, content["meta"], path)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        if is_exhausted(error):
            raise
        raise CheckpointError(_broken(path, error)) from error


def _manifest(path: Path) -> tuple[dict[str, str], str]:
    """The hashes of a checkpoint's files by name, and why it is not complete, if it is not."""
    try:
        manifest = dict(json.loads((path / MANIFEST).read_text(encoding="utf-8")))
        if not all(
            FILE_NAME.fullmatch(name) and isinstance(manifest[name], str)
            for name in (*manifest, META)
        ):
            raise ValueError(f"{MANIFEST} does not name the files of a checkpoint")
    except (OSError, ValueError, KeyError, TypeError) as error:
        return {}, _broken(path, error)
    return manifest, ""


def _problem(path: Path, name: str, digest: str) -> str:
    """Why a file of checkpoint ``path`` cannot be used.

    Empty if it has the hash that it was saved with.
    """
    try:
        sound = sha256_file(path / name) == digest
    except OSError as error:
        return _broken(path, error)
    return (
        ""
        if sound
        else f"checkpoint {path} is broken: {name} does not have the sha256 it was saved with"
    )


def _broken(path: Path, error: Exception) -> str:
    return f"checkpoint {path} is broken: {type(error).__name__}: {error}"


# What other processes may take meanwhile, as a share of the memory that is available.
MARGIN = 0.1
# Of pieces that are copied only to be written, as many bytes are copied at a time.
STREAM_BYTES = 2**29


class HostCopies:
    """Makes the copies.

    GPU tensors go to pinned buffers, which are kept and filled again for every checkpoint.

    Those of CPU tensors are new every time: to keep them would take memory that the training itself
    may need.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._needed = 0
        self._last_copied = 0

    def copy(self, pieces: Mapping[str, Piece]) -> tuple[dict[str, Piece], list[dict[str, Piece]]]:
        """Copy the pieces that host memory has room for.

        Returns:
            The copies, of which those of GPU tensors are valid until the next state is copied; and
            all other pieces themselves, in groups small enough to be brought to host memory one
            after another.
        """
        room = self._room()
        copies: dict[str, Piece] = {}
        uncopied: dict[str, Piece] = {}
        for name, piece in pieces.items():
            needed = bytes_of(piece)
            if needed and piece.values.is_cuda:  # PyTorch rounds pinned memory up to powers of two
                needed = (
                    0 if self._fits_buffer(name, piece.values) else 1 << (needed - 1).bit_length()
                )
            values = self._copied(name, piece.values) if needed <= max(room, 0) else None
            if values is None:
                uncopied[name] = piece
            else:
                room -= needed
                copies[name] = replace(piece, values=values)
        if self._buffers:
            torch.cuda.current_stream().synchronize()
        self._last_copied = sum(
            bytes_of(piece) for name, piece in copies.items() if name not in self._buffers
        )
        return copies, _in_groups(uncopied)

    def _room(self) -> int:
        """Bytes of host memory that copies of this rank may take.

        What training takes between two checkpoints beyond what it holds at one, gradients and
        activations above all, is left to it: the peak of the process since the last one, less the
        copies made then, tells how much that is.
        """
        available = host_memory.share_of_process(host_memory.available_memory())
        self._needed = max(self._needed, host_memory.peak_above_now() - self._last_copied)
        host_memory.forget_peak()
        return int(available * (1 - MARGIN)) - self._needed

    def _fits_buffer(self, name: str, values: Tensor) -> bool:
        buffer = self._buffers.get(name)
        return buffer is not None and buffer.shape == values.shape and buffer.dtype == values.dtype

    def _copied(self, name: str, values: Tensor) -> Tensor | None:
        """The copy; None if the process, or the limit of pinned memory, refuses it."""
        try:
            if not values.is_cuda:
                return values.clone(memory_format=torch.contiguous_format)
            if not self._fits_buffer(name, values):
                self._buffers[name] = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        except RuntimeError:
            return None
        return self._buffers[name].copy_(values, non_blocking=True)


def _in_groups(pieces: Mapping[str, Piece]) -> list[dict[str, Piece]]:
    """Divide pieces into groups of at most ``STREAM_BYTES`` of copies, or of one piece.

    Contiguous tensors on the CPU are written as they are.
    """
    groups: list[dict[str, Piece]] = []
    copied = 0
    for name, piece in pieces.items():
        size = 0 if piece.values.is_contiguous() and not piece.values.is_cuda else bytes_of(piece)
        if not groups or (copied and size and copied + size > STREAM_BYTES):
            groups.append({})
            copied = 0
        copied += size
        groups[-1][name] = piece
    return groups


def bytes_of(piece: Piece) -> int:
    return piece.values.numel() * piece.values.element_size()


class BackgroundWriter:
    """Runs jobs in the order of their submission, beside the calling thread.

    Its threads do not keep the process alive: whoever needs a job done waits for its future.
    """

    def __init__(self) -> None:
        self._last: Future[None] | None = None

    def submit(self, job: Callable[[], None]) -> Future[None]:
        """Run ``job`` after those before it; its error becomes that of the future."""
        before, future = self._last, Future[None]()
        self._last = future

        def run() -> None:
            if before is not None:
                wait([before])
            try:
                job()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)

        threading.Thread(target=run, name="checkpoint-writer", daemon=True).start()
        return future
