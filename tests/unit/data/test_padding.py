"""Micro-batches of similar length: every row once, the fewest positions, the same number on all ranks."""

from __future__ import annotations

from itertools import combinations
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.data import batches as padding
from rlhf_core.data.batches import least_padded, padding_share, partitions

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=9)


def test_padding_share_by_hand() -> None:
    assert padding_share(60, 80) == 0.25
    assert padding_share(80, 80) == 0.0 == padding_share(0, 0)


def test_partitions_by_hand() -> None:
    # Whole: 4 rows of 10. In two: 10 + 9 in rows of 10, 3 + 2 in rows of 3. In three: only 2 is padded, to 3.
    one, two, three, four = partitions([10, 3, 9, 2], 4)
    assert (one.micro_batches, one.computed) == ([[0, 1, 2, 3]], 40)
    assert (two.micro_batches, two.computed) == ([[3, 1], [2, 0]], 26)
    assert (three.computed, four.computed) == (25, 24)
    assert four.micro_batches == [[3], [1], [2], [0]]


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 4))
def test_partitions_need_the_fewest_positions(lengths: list[int], most: int) -> None:
    most = min(most, len(lengths))
    ordered = sorted(lengths)
    for count, partition in enumerate(partitions(lengths, most), 1):
        parts = partition.micro_batches
        assert len(parts) == count and all(parts)
        assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
        assert partition.computed == sum(len(part) * max(lengths[row] for row in part) for part in parts)
        fewest = min(
            sum((b - a) * ordered[b - 1] for a, b in zip((0, *cuts), (*cuts, len(ordered)), strict=True))
            for cuts in combinations(range(1, len(ordered)), count - 1)
        )
        assert partition.computed == fewest


def test_a_long_batch_is_cut_at_some_of_its_rows() -> None:
    lengths = [1 + (i * 7919) % 1500 for i in range(2000)]
    whole, *_, eight = partitions(lengths, 8)
    assert sorted(row for part in eight.micro_batches for row in part) == list(range(2000))
    # Eight micro-batches of evenly spread lengths pad a sixteenth of the longest row.
    assert padding_share(sum(lengths), whole.computed) == pytest.approx(0.5, abs=0.01)
    assert padding_share(sum(lengths), eight.computed) == pytest.approx(1 / 9, abs=0.01)


@settings(deadline=None)
@given(st.lists(LENGTHS, min_size=1, max_size=4), st.floats(0.01, 1))
def test_ranks_make_as_many_passes_and_no_more_than_needed(shards: list[list[int]], limit: float) -> None:
    with mock.patch.object(padding, "SMALLEST_MICRO_BATCH", 1):
        chosen = least_padded(shards, limit)
    (count,) = {len(partition.micro_batches) for partition in chosen}
    useful = sum(map(sum, shards))

    def share(parts: int) -> float:
        return padding_share(useful, sum(partitions(lengths, parts)[-1].computed for lengths in shards))

    most = min(8, *map(len, shards))
    assert count == most or share(count) <= limit
    assert count == 1 or share(count - 1) > limit


def test_small_batches_stay_whole() -> None:
    lengths = [100] * 5 + [10] * 5
    assert padding_share(sum(lengths), 1000) == 0.45
    (whole,) = least_padded([lengths], 0.1)
    assert whole.micro_batches == [list(range(10))], "two micro-batches would have fewer than 512 positions"
    (cut,) = least_padded([lengths * 2], 0.1)
    assert sorted(map(len, cut.micro_batches)) == [10, 10] and cut.computed == 2 * sum(lengths)
