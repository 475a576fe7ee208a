"""Counting the bytes of live tensors."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rlhf_core.memory.tensor_memory import TensorMemory

MEBI = 1 << 20


def megabyte() -> torch.Tensor:
    return torch.zeros(MEBI, dtype=torch.uint8)


def test_a_storage_counts_once_until_its_last_view_is_gone() -> None:
    with TensorMemory() as memory:
        whole = megabyte()
        view = whole[10:].view(-1)
        assert memory.live == MEBI
        del whole
        assert memory.live == MEBI
        del view
        assert memory.live == 0 and memory.peak == MEBI


def test_what_autograd_keeps_counts_and_the_backward_pass_frees_it() -> None:
    weight = torch.ones(1024, requires_grad=True)
    with TensorMemory() as memory:
        memory.hold([weight])
        loss = weight.exp().exp().sum()
        # Both exponentials are kept for the backward pass, beside the weight and the scalar.
        assert memory.live == 3 * 4096 + 4
        loss.backward()
        del loss
        assert memory.live == 2 * 4096  # the weight and its gradient


def test_a_phase_keeps_its_highest_peak_and_starts_from_what_is_there() -> None:
    with TensorMemory() as memory:
        kept = megabyte()
        for count in (2, 1):
            with memory.phase("work"):
                _ = [megabyte() for _ in range(count)]
                del _
        with memory.phase("rest"):
            pass
        assert memory.peaks == {"work": 3 * MEBI, "rest": MEBI}
        del kept


def test_tensors_without_storage_are_counted_by_their_shape() -> None:
    with FakeTensorMode(), TensorMemory() as memory:
        huge = torch.empty(1 << 40, dtype=torch.bfloat16)
        assert memory.live == 2 << 40
        del huge
        assert memory.live == 0
