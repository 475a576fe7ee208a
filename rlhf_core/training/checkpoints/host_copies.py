"""Copies of a training state in host memory: what a checkpoint is written from while training goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from rlhf_core.training.checkpoints.pieces import Piece


class HostCopies:
    """Makes the copies. GPU tensors go to pinned buffers, which are kept and filled again for every checkpoint.

    Those of CPU tensors are new every time: to keep them would take memory that the training itself may need.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def copy(self, pieces: Mapping[str, Piece]) -> dict[str, Piece]:
        """Copy all pieces. The copies of GPU tensors are valid until the next call."""
        copies = {name: replace(piece, values=self._copied(name, piece.values)) for name, piece in pieces.items()}
        if self._buffers:
            torch.cuda.current_stream().synchronize()
        return copies

    def _copied(self, name: str, values: Tensor) -> Tensor:
        if not values.is_cuda:
            return values.clone(memory_format=torch.contiguous_format)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != values.shape or buffer.dtype != values.dtype:
            buffer = self._buffers[name] = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        return buffer.copy_(values, non_blocking=True)
