"""Copies of a training state in host memory: what a checkpoint is written from while training goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from rlhf_core.training.checkpoints.pieces import Piece


class HostCopies:
    """Buffers that are filled again for every checkpoint: fresh memory would take several times as long to fill.

    Those of GPU tensors are pinned.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def copy(self, pieces: Mapping[str, Piece]) -> dict[str, Piece]:
        """Copy all pieces. The copies of an earlier call become invalid."""
        copies = {name: replace(piece, values=self._copied(name, piece.values)) for name, piece in pieces.items()}
        for name in self._buffers.keys() - pieces.keys():
            del self._buffers[name]
        if any(piece.values.is_cuda for piece in pieces.values()):
            torch.cuda.current_stream().synchronize()
        return copies

    def _copied(self, name: str, values: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != values.shape or buffer.dtype != values.dtype:
            buffer = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
            self._buffers[name] = buffer
        return buffer.copy_(values, non_blocking=True)
