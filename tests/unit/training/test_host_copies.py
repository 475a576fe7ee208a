"""Copies of a state in host memory: how much of it there is room for, and what becomes of the rest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rlhf_core.runtime import machine as host_memory
from rlhf_core.training.checkpoints import host_copies
from rlhf_core.training.checkpoints.checkpoint import Piece
from rlhf_core.training.checkpoints.host_copies import HostCopies


def whole(**tensors: torch.Tensor) -> dict[str, Piece]:
    return {name: Piece.whole(tensor) for name, tensor in tensors.items()}


def test_what_training_takes_between_checkpoints_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 bytes are available, of which a tenth stays free. Peaks before three checkpoints: 300, 700, 1,100.

    With copies of 600 bytes, 700 and 1,100 mean that training took 100 and 500.
    """
    peaks: Iterator[int] = iter([300, 700, 1100])
    monkeypatch.setattr(host_memory, "available_memory", lambda: 1000)
    monkeypatch.setattr(host_memory, "peak_above_now", lambda: next(peaks))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    copies, state = HostCopies(), whole(w=torch.ones(100), v=torch.ones(50))
    copied = [sorted(copies.copy(state)[0]) for _ in range(3)]
    assert copied == [["v", "w"], ["v", "w"], ["w"]]  # 600 bytes are just enough, 400 are not
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(host_memory, "peak_above_now", lambda: 0)
    assert copies.copy(state)[0] == {}  # 450 - 500


def test_memory_that_is_refused_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: torch.Tensor, **options: object) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch.Tensor, "clone", refused)
    copied, uncopied = HostCopies().copy(whole(w=torch.ones(2)))
    assert copied == {} and [list(group) for group in uncopied] == [["w"]]
    assert host_copies.bytes_of(uncopied[0]["w"]) == 8


def test_pieces_that_must_be_copied_to_be_written_are_in_small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copies, "STREAM_BYTES", 40)
    monkeypatch.setattr(HostCopies, "_room", lambda self: -1)
    transposed = torch.ones(2, 2).t()  # 16 bytes each
    state = whole(a=transposed, b=torch.ones(100), c=transposed, d=transposed, e=torch.ones(3), f=torch.ones(6, 7).t())
    _, uncopied = HostCopies().copy(state)
    assert [list(group) for group in uncopied] == [["a", "b", "c"], ["d", "e"], ["f"]]


def test_an_empty_tensor_needs_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostCopies, "_room", lambda self: -1)
    assert list(HostCopies().copy(whole(empty=torch.ones(0)))[0]) == ["empty"]
