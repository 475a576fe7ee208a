"""Copies of a training state in host memory: what a checkpoint is written from while training goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlhf_core.runtime import host_memory
from rlhf_core.training.checkpoints.pieces import Piece

# What other processes may take meanwhile, as a share of the memory that is available.
MARGIN = 0.1
# Of GPU tensors without room for a copy, as many bytes are in host memory at a time.
STREAM_BYTES = 2**29


@dataclass(frozen=True)
class HostCopy:
    """A state, of which host memory may have had no room for all.

    Attributes:
        pieces: The copies. Those of GPU tensors are valid until the next state is copied.
        uncopied: Pieces themselves, in groups small enough to be brought to host memory one after another.
    """

    pieces: dict[str, Piece]
    uncopied: list[dict[str, Piece]]

    @property
    def bytes(self) -> int:
        """Size of the whole state."""
        return sum(map(_size, self.pieces.values())) + self.uncopied_bytes

    @property
    def uncopied_bytes(self) -> int:
        """Size of the pieces that were not copied."""
        return sum(_size(piece) for group in self.uncopied for piece in group.values())


class HostCopies:
    """Makes the copies. GPU tensors go to pinned buffers, which are kept and filled again for every checkpoint.

    Those of CPU tensors are new every time: to keep them would take memory that the training itself may need.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._needed: int | None = None

    def copy(self, pieces: Mapping[str, Piece]) -> HostCopy:
        """Copy the pieces that host memory has room for."""
        room = self._room()
        copies: dict[str, Piece] = {}
        uncopied: list[dict[str, Piece]] = []
        for name, piece in pieces.items():
            new = 0 if self._fits_buffer(name, piece.values) else _size(piece)
            if new <= room:
                room -= new
                copies[name] = replace(piece, values=self._copied(name, piece.values))
            else:
                _add_to_groups(uncopied, name, piece)
        if self._buffers:
            torch.cuda.current_stream().synchronize()
        return HostCopy(copies, uncopied)

    def _room(self) -> int:
        """Bytes of host memory that copies of this rank may take.

        What training takes between two checkpoints beyond what it holds at one, gradients and activations above all, is
        left to it: the peak of the process before its first copy tells how much that is.
        """
        if self._needed is None:
            self._needed = host_memory.peak_above_now()
        available = host_memory.share_of_process(host_memory.available_memory())
        return int(available * (1 - MARGIN)) - self._needed

    def _fits_buffer(self, name: str, values: Tensor) -> bool:
        buffer = self._buffers.get(name)
        return buffer is not None and buffer.shape == values.shape and buffer.dtype == values.dtype

    def _copied(self, name: str, values: Tensor) -> Tensor:
        if not values.is_cuda:
            return values.clone(memory_format=torch.contiguous_format)
        if not self._fits_buffer(name, values):
            self._buffers[name] = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        return self._buffers[name].copy_(values, non_blocking=True)


def _add_to_groups(groups: list[dict[str, Piece]], name: str, piece: Piece) -> None:
    held = sum(_size(each) for each in groups[-1].values() if each.values.is_cuda) if groups else 0
    if not groups or (piece.values.is_cuda and held and held + _size(piece) > STREAM_BYTES):
        groups.append({})
    groups[-1][name] = piece


def _size(piece: Piece) -> int:
    return piece.values.numel() * piece.values.element_size()
