"""Every index once per epoch, budgets and bounds respected, and nothing but (seed, epoch) decides."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.data.batches import batch_at, epoch_order, token_budget_batches

SEEDS = st.integers(0, 2**31)
EPOCHS = st.integers(0, 1000)


@given(st.integers(0, 300), SEEDS, EPOCHS)
def test_epoch_order_is_a_permutation_and_repeatable(n: int, seed: int, epoch: int) -> None:
    order = epoch_order(n, seed, epoch)
    assert sorted(order) == list(range(n))
    assert order == epoch_order(n, seed, epoch)


def test_epoch_and_seed_change_the_order() -> None:
    assert epoch_order(50, 1, 0) != epoch_order(50, 1, 1)
    assert epoch_order(50, 1, 0) != epoch_order(50, 2, 0)


@given(st.integers(1, 30), st.integers(1, 70), SEEDS)
def test_stream_of_steps_is_the_epochs_end_to_end(n: int, size: int, seed: int) -> None:
    steps = 8
    stream = [i for step in range(steps) for i in batch_at(n, size, seed, step)]
    epochs = [i for epoch in range(steps * size // n + 1) for i in epoch_order(n, seed, epoch)]
    assert stream == epochs[: steps * size]


def test_a_batch_from_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing"):
        batch_at(0, 4, 1, 0)


@given(
    st.lists(st.integers(1, 400), max_size=300),
    st.integers(50, 5000),
    st.integers(1, 8),
    st.integers(0, 60),
    SEEDS,
    EPOCHS,
)
def test_token_budget(lengths: list[int], budget: int, low: int, extra: int, seed: int, epoch: int) -> None:
    high = low + extra
    batches = token_budget_batches(lengths, budget, low, high, seed, epoch)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert all(1 <= len(batch) <= high for batch in batches)
    short = [batch for batch in batches if len(batch) < low]
    assert len(short) <= 1
    assert not short or len(batches) == 1 or high < 2 * low, "only a remainder that no neighbour can take stays small"
    for batch in batches:
        cost = 2 * len(batch) * max(lengths[i] for i in batch)
        assert cost <= budget or len(batch) < 2 * low, "the budget yields to min_pairs only"


def test_token_budget_by_hand() -> None:
    # Sorted: 10 ×4, then 20 ×2. Budget 80 = 4 pairs of 2×10 tokens, or 2 pairs of 2×20.
    batches = token_budget_batches([10, 20, 10, 20, 10, 10], 80, 1, 100, seed=3, epoch=0)
    assert sorted(sorted(batch) for batch in batches) == [[0, 2, 4, 5], [1, 3]]


def test_an_epoch_of_some_rows_has_those_alone() -> None:
    batches = token_budget_batches([10] * 40, 80, 2, 4, seed=3, epoch=1, rows=[5, 7, 11, 30, 39])
    assert sorted(i for batch in batches for i in batch) == [5, 7, 11, 30, 39]
    every = token_budget_batches([10] * 40, 80, 2, 4, seed=3, epoch=1, rows=range(40))
    assert every == token_budget_batches([10] * 40, 80, 2, 4, seed=3, epoch=1)


def test_token_budget_batches_follow_no_length_order() -> None:
    lengths = list(range(1, 2001))
    batches = token_budget_batches(lengths, 10**9, 1, 10, seed=1, epoch=0)
    means = [sum(lengths[i] for i in batch) / len(batch) for batch in batches]
    assert means != sorted(means)
