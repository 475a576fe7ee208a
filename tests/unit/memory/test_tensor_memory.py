"""Counting the bytes of live tensors."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rlhf_extras.memory.dry_run import MemoryUse, TensorMemory, largest

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


def test_the_peak_starts_from_what_is_there() -> None:
    with TensorMemory() as memory:
        kept = megabyte()
        _ = [megabyte() for _ in range(2)]
        del _
        assert (memory.live, memory.peak) == (MEBI, 3 * MEBI)
        memory.restart()
        assert memory.peak == MEBI
        del kept


def test_tensors_without_storage_are_counted_by_their_shape() -> None:
    with FakeTensorMode(), TensorMemory() as memory:
        huge = torch.empty(1 << 40, dtype=torch.bfloat16)
        assert memory.live == 2 << 40
        del huge
        assert memory.live == 0


def test_storages_are_counted_by_kind() -> None:
    weight = torch.ones(8, 64, requires_grad=True)
    with TensorMemory(vocabulary=8) as memory:
        memory.hold([weight])
        hidden = torch.zeros(4, 64)
        memory.begin_segment()
        logits = hidden @ weight.T
        logits.sum().backward()
        gradient = weight.grad
        assert gradient is not None
        memory.recount(gradient, "gradients")
        memory.begin_segment()
        del logits
        memory.begin_segment()
    before, during, after = memory.segments
    assert before == MemoryUse(weights=8 * 64 * 4, activations=4 * 64 * 4)
    # The gradient of the logits is an expanded scalar; that of the weights has the vocabulary as
    # its first dimension.
    assert (during.logits, during.other) == (4 * 8 * 4, 8 * 64 * 4)
    assert (after.gradients, after.other) == (8 * 64 * 4, 0)


def test_a_storage_may_stand_for_several_once_its_segment_has_ended() -> None:
    with TensorMemory() as memory:
        memory.begin_segment(repeat=5)
        kept, passed_on, dropped = megabyte(), megabyte(), megabyte()
        del dropped
        memory.begin_segment()
        memory.recount(passed_on, repeat=1)
        more = megabyte()
        memory.begin_segment()
        del kept, passed_on, more
        assert memory.live == 0
    assert [use.total for use in memory.segments] == [0, 10 * MEBI]
    with TensorMemory() as memory:
        kept = megabyte()
        memory.begin_segment()
        memory.recount(kept, "kv_cache", repeat=3)
        memory.begin_segment()
    assert memory.segments == [MemoryUse(activations=MEBI), MemoryUse(kv_cache=3 * MEBI)]


def test_uses_add_up_and_the_largest_has_the_highest_total() -> None:
    weights, cache = MemoryUse(weights=3), MemoryUse(kv_cache=2, logits=2)
    assert (
        (weights + cache).total == 7
        and largest([weights, cache]) == cache
        and largest([]) == MemoryUse()
    )


@pytest.mark.skipif(
    not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="torch has no oneDNN, or the processor no bfloat16 instructions that it packs weights for",
)
def test_packed_weights_count_for_as_long_as_they_live() -> None:
    with TensorMemory() as memory:
        packed = torch.ops.mkldnn._reorder_linear_weight(
            torch.zeros(16, 32, dtype=torch.bfloat16), 8
        )
        assert memory.live == packed.numel() * 2
        del packed
        assert memory.live == 0
