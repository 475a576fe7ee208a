"""Tensors of a training state in pieces: what each rank writes of them, and how they are read by any number of ranks.

A file of pieces is a safetensors file. A tensor that is whole has its own shape in it; a piece of one is flat. The
header says which elements it holds, in the form of torch's distributed checkpoints, whose ``HuggingFaceStorageReader``
can read the files too, and the shape of the whole.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlhf_core.errors import CheckpointError
from rlhf_core.runtime import distributed

# torch.distributed.checkpoint._hf_utils.CUSTOM_METADATA_KEY. More than one key would be written in random order.
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
    """This rank's share of tensors that every rank holds: an equal part of each; all of them in one process."""
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
    """Write contiguous CPU tensors, of which no two share elements, to a safetensors file. Nothing is copied.

    Raises:
        SafetensorError: It cannot be written.
    """
    header = {
        name: {"saved_offsets": [0] * len(piece.shape) if piece.is_whole else [piece.start], "shape": piece.shape}
        for name, piece in pieces.items()
    }
    save_file({name: piece.values for name, piece in pieces.items()}, path, {HEADER: json.dumps(header)})


@dataclass(frozen=True)
class _StoredPiece:
    file: Path
    start: int
    stop: int
    is_whole: bool


class SavedTensors:
    """The tensors in some files of pieces. Elements are read when they are asked for.

    What is returned may share memory with a file: copy it before changing it.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        """Read the headers; ``SafetensorError`` or ``ValueError`` if one is damaged."""
        self._files: dict[Path, Any] = {path: safe_open(path, framework="pt") for path in files}
        self._prefix = ""
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._pieces: dict[str, list[_StoredPiece]] = {}
        for path, file in self._files.items():
            header = json.loads((file.metadata() or {}).get(HEADER, "{}"))
            names: list[str] = file.keys()
            for name in names:
                stored = tuple(file.get_slice(name).get_shape())
                shape = tuple(header[name]["shape"]) if name in header else stored
                start = 0 if shape == stored else int(header[name]["saved_offsets"][0])
                piece = _StoredPiece(path, start, start + math.prod(stored), shape == stored)
                self._shapes[name] = shape
                self._pieces.setdefault(name, []).append(piece)

    def under(self, prefix: str) -> SavedTensors:
        """Those whose names begin with ``prefix``, which is taken off."""
        view = object.__new__(SavedTensors)
        view._files, view._shapes, view._pieces = self._files, self._shapes, self._pieces
        view._prefix = self._prefix + prefix
        return view

    @property
    def names(self) -> set[str]:
        """Names of the tensors."""
        return {name.removeprefix(self._prefix) for name in self._pieces if name.startswith(self._prefix)}

    def all_under(self, prefix: str) -> dict[str, Tensor]:
        """The whole tensors whose names begin with ``prefix``, under their full names."""
        return {name: self.whole(name) for name in sorted(self.names) if name.startswith(prefix)}

    def whole(self, name: str) -> Tensor:
        """The whole tensor on the CPU; ``KeyError`` if there is none of that name."""
        shape = self._shapes[self._prefix + name]
        return self.read(name, 0, math.prod(shape)).view(shape)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements ``start`` to ``stop`` of a tensor in row-major order, flat, on the CPU.

        Raises:
            CheckpointError: Some of them are in no file.
        """
        key = self._prefix + name
        parts, position = [], start
        for piece in sorted(self._pieces[key], key=lambda piece: piece.start):
            if piece.start <= position < piece.stop:
                end = min(stop, piece.stop)
                parts.append(self._elements(key, piece, position - piece.start, end - piece.start))
                position = end
        if position < stop:
            folder = next(iter(self._files)).parent
            raise CheckpointError(
                f"checkpoint {folder} is incomplete: elements {position} to {stop} of {key} are missing"
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _elements(self, key: str, piece: _StoredPiece, start: int, stop: int) -> Tensor:
        file = self._files[piece.file]
        if piece.is_whole:
            elements: Tensor = file.get_tensor(key).view(-1)[start:stop]
        else:
            elements = file.get_slice(key)[start:stop]
        return elements
