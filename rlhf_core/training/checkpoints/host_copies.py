"""Copies of a training state in host memory, and the thread that writes them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import replace

import torch
from torch import Tensor

from rlhf_core.runtime import machine as host_memory
from rlhf_core.training.checkpoints.checkpoint import Piece

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
