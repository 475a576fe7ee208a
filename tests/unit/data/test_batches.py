"""Batches: every row once per epoch by (seed, epoch) alone, least padding, whole prompts, balanced
lengths.
"""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.config.ppo import PpoConfig
from rlhf_core.config.reward import PairBatchConfig, RewardConfig
from rlhf_core.data import batches as padding
from rlhf_core.data.batches import (
    PromptBatches,
    TokenisedPair,
    batch_at,
    epoch_order,
    least_padded,
    length_balanced_epoch,
    length_balanced_rows,
    padding_share,
    pair_sequences,
    partitions,
    rows_by_category_share,
    token_budget_batches,
)
from rlhf_core.errors import DataError
from rlhf_core.training.reward.trainer import rows_of_epoch

SEEDS = st.integers(0, 2**31)
EPOCHS = st.integers(0, 1000)


@given(st.integers(0, 300), SEEDS, EPOCHS)
def test_an_epoch_is_a_permutation_by_seed_and_epoch_alone(n: int, seed: int, epoch: int) -> None:
    order = epoch_order(n, seed, epoch)
    assert sorted(order) == list(range(n)) and order == epoch_order(n, seed, epoch)
    if n >= 50:  # where two permutations are the same by no chance
        assert epoch_order(n, seed + 1, epoch) != order != epoch_order(n, seed, epoch + 1)


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
def test_token_budget(
    lengths: list[int], budget: int, low: int, extra: int, seed: int, epoch: int
) -> None:
    high = low + extra
    batches = token_budget_batches(lengths, budget, low, high, seed, epoch)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert all(1 <= len(batch) <= high for batch in batches)
    short = [batch for batch in batches if len(batch) < low]
    assert len(short) <= 1
    assert not short or len(batches) == 1 or high < 2 * low, (
        "only a remainder that no neighbour can take stays small"
    )
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


LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=9)


def test_padding_share_by_hand() -> None:
    assert padding_share(60, 80) == 0.25
    assert padding_share(80, 80) == 0.0 == padding_share(0, 0)


def test_partitions_by_hand() -> None:
    # Whole: 4 rows of 10. In two: 10 + 9 in rows of 10, 3 + 2 in rows of 3. In three: only 2 is
    # padded, to 3.
    one, two, three, four = partitions([10, 3, 9, 2], 4)
    assert (one.micro_batches, one.computed) == ([[0, 1, 2, 3]], 40)
    assert (two.micro_batches, two.computed) == ([[3, 1], [2, 0]], 26)
    assert (three.computed, four.computed) == (25, 24)
    assert four.micro_batches == [[3], [1], [2], [0]]


@given(LENGTHS, st.integers(1, 4))
def test_partitions_need_the_fewest_positions(lengths: list[int], most: int) -> None:
    most = min(most, len(lengths))
    ordered = sorted(lengths)
    for count, partition in enumerate(partitions(lengths, most), 1):
        parts = partition.micro_batches
        assert len(parts) == count and all(parts)
        assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
        assert partition.computed == sum(
            len(part) * max(lengths[row] for row in part) for part in parts
        )
        fewest = min(
            sum(
                (b - a) * ordered[b - 1]
                for a, b in zip((0, *cuts), (*cuts, len(ordered)), strict=True)
            )
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


@given(st.lists(LENGTHS, min_size=1, max_size=4), st.floats(0.01, 1))
def test_ranks_make_as_many_passes_and_no_more_than_needed(
    shards: list[list[int]], limit: float
) -> None:
    with mock.patch.object(padding, "SMALLEST_MICRO_BATCH", 1):
        chosen = least_padded(shards, limit)
    (count,) = {len(partition.micro_batches) for partition in chosen}
    useful = sum(map(sum, shards))

    def share(parts: int) -> float:
        return padding_share(
            useful, sum(partitions(lengths, parts)[-1].computed for lengths in shards)
        )

    most = min(8, *map(len, shards))
    assert count == most or share(count) <= limit
    assert count == 1 or share(count - 1) > limit


def test_small_batches_stay_whole() -> None:
    lengths = [100] * 5 + [10] * 5
    assert padding_share(sum(lengths), 1000) == 0.45
    (whole,) = least_padded([lengths], 0.1)
    assert whole.micro_batches == [list(range(10))], (
        "two micro-batches would have fewer than 512 positions"
    )
    (cut,) = least_padded([lengths * 2], 0.1)
    assert sorted(map(len, cut.micro_batches)) == [10, 10] and cut.computed == 2 * sum(lengths)


# Rows 0 to 79 are general, 80 to 89 harmless, 90 to 99 rude.
CATEGORIES = ["general"] * 80 + ["harmless"] * 10 + ["rude"] * 10


def mixture(shares: dict[str, float], epoch: int = 0, **more: list[int]) -> list[int]:
    return rows_by_category_share(CATEGORIES, shares, 7, epoch, "reward.category_shares", **more)


def test_what_is_left_of_a_share_is_drawn_anew_in_each_epoch() -> None:
    # 80 others are half of 160: harmless 40 of them, and of the rude 40 too; with 0.28 and 0.22,
    # 44.8 and 35.2.
    counts = [Counter(mixture({"harmless": 0.28, "rude": 0.22}, epoch)) for epoch in (0, 1)]
    for count in counts:
        assert all(count[row] == 1 for row in range(80))
        assert sorted(count[row] for row in range(80, 90)) == [4] * 5 + [5] * 5
        assert sorted(count[row] for row in range(90, 100)) == [3] * 5 + [4] * 5
    assert counts[0] != counts[1]
    assert mixture({"harmless": 0.28, "rude": 0.22}) == sorted(counts[0].elements()), (
        "a function of seed and epoch"
    )


def test_a_small_share_draws_fewer_rows_than_there_are() -> None:
    # 90 others are 0.95 of 94.7: five harmless rows.
    rows = mixture({"harmless": 0.05})
    assert len([row for row in rows if 80 <= row < 90]) == len(set(rows) & set(range(80, 90))) == 5


def test_rows_are_chosen_from_those_that_are_given() -> None:
    assert Counter(mixture({"harmless": 0.5}, rows=[3, 4, 85])) == {3: 1, 4: 1, 85: 2}
    assert mixture({}, rows=[85, 3]) == [85, 3]


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        (
            {"harmles": 0.2},
            "reward.category_shares names the category harmles, .*; there are: general, harmless, rude",
        ),
        ({"general": 0.2, "harmless": 0.2, "rude": 0.2}, "names all categories"),
    ],
)
def test_shares_that_no_rows_can_fill_are_refused(shares: dict[str, float], message: str) -> None:
    with pytest.raises(DataError, match=message):
        mixture(shares)


@pytest.mark.parametrize(
    ("shares", "ptx", "message"),
    [
        ({"harmless": 1.0}, None, "the share of harmless is 1; it must be above 0 and below 1"),
        ({"harmless": 0.0}, None, "the share of harmless is 0;"),
        ({"harmless": float("nan")}, None, "a finite number"),
        ({"harmless": 0.6, "rude": 0.4}, None, "add up to 1, which leaves nothing"),
        (
            {"harmless": 0.17},
            {"weight": 0.0},
            "category_shares mixes the ptx texts, but weight is 0",
        ),
        (
            {"harmless": 0.17},
            {"data": "both"},
            "category_shares mixes the texts of one set, but data is both",
        ),
    ],
)
def test_settings_of_shares_are_refused(
    shares: dict[str, float], ptx: dict[str, object] | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        if ptx is None:
            RewardConfig(category_shares=shares)
        else:
            PpoConfig.model_validate({"ptx": ptx | {"category_shares": shares}})


def test_pairs_are_balanced_by_length_within_a_category_and_then_mixed() -> None:
    """In each category one pair in four prefers the shorter reply."""

    def pair(number: int, category: str) -> TokenisedPair:
        chosen, rejected = (1, 9) if number % 4 == 0 else (9, 1)
        return TokenisedPair(number, [number], [5] * chosen, [6] * rejected, category)

    pairs = [pair(i, "harmless" if i >= 160 else "general") for i in range(200)]
    config = RewardConfig(length_balance="sampling", category_shares={"harmless": 0.5})
    rows = rows_of_epoch(pairs, config, "reward", epoch=0)
    kinds = Counter((pairs[row].category, pairs[row].length_difference > 0) for row in rows)
    # 40 of 160 general pairs prefer the shorter reply, so 80 are balanced. 20 harmless ones are,
    # each four times.
    assert kinds == {
        (name, longer): 40 for name in ("general", "harmless") for longer in (True, False)
    }
    assert set(Counter(row for row in rows if row >= 160).values()) == {4}


DIFFERENCES = st.lists(st.integers(-30, 30), max_size=400)


def test_the_rarer_kind_is_kept_whole_and_matched() -> None:
    # 7 pairs are one stratum: three prefer the shorter reply, three the longer one, one is a tie.
    assert length_balanced_rows([5, -3, 0, 2, -8, 1, -1], seed=1) == [0, 1, 3, 4, 5, 6]
    rows = length_balanced_rows([5, -3, 0, 2, -8, 1, 7, 9], seed=1)
    assert {1, 4} < set(rows) and len(rows) == 4 and 2 not in rows


@given(DIFFERENCES, st.integers(0, 2**40), st.integers(0, 50))
def test_preferring_the_longer_is_right_in_exactly_half(
    differences: list[int], seed: int, draw: int
) -> None:
    rows = length_balanced_rows(differences, seed, draw)
    drawn = [differences[i] for i in rows]
    assert sum(d > 0 for d in drawn) == sum(d < 0 for d in drawn) == len(rows) / 2
    assert rows == sorted(set(rows)) == length_balanced_rows(differences, seed, draw)


def test_no_threshold_on_the_difference_beats_chance_by_much() -> None:
    # The longer reply is preferred the more often the longer it is, as people do: always beyond 200
    # tokens.
    generator = np.random.default_rng(0)
    size = generator.integers(1, 400, 4000)
    longer = generator.random(4000) < np.minimum(0.5 + size / 400, 1.0)
    difference = np.where(longer, size, -size)

    def best_rule(rows: np.ndarray) -> float:
        """The highest accuracy of "the longer one if it is longer by t, else the shorter one"."""
        drawn = difference[rows]
        return max(
            float((np.where(abs(drawn) >= t, drawn, -drawn) > 0).mean()) for t in range(0, 400, 5)
        )

    shorter = np.flatnonzero(~longer)
    equal_numbers = np.concatenate(
        [shorter, generator.permutation(np.flatnonzero(longer))[: len(shorter)]]
    )
    assert best_rule(equal_numbers) > 0.7
    assert best_rule(np.array(length_balanced_rows(difference, seed=3))) < 0.56


def test_seed_and_draw_change_which_of_the_commoner_kind_are_drawn() -> None:
    differences = [1] * 30 + [-1] * 10
    draws = [
        length_balanced_rows(differences, seed, draw) for seed, draw in ((1, 0), (1, 1), (2, 0))
    ]
    assert len({tuple(rows) for rows in draws}) == 3
    assert all(set(range(30, 40)) <= set(rows) for rows in draws)


def test_an_epoch_has_all_pairs_of_equal_length() -> None:
    rows = length_balanced_epoch([0, 4, 0, -4, 9], seed=1, epoch=2)
    assert {0, 2, 3} < set(rows) and len(rows) == 4


ids = st.lists(st.integers(5, 9), min_size=1, max_size=3)
PROMPT_LENGTHS = st.lists(
    st.lists(st.integers(2, 30), min_size=2, max_size=6), min_size=1, max_size=12
)


def pairs_against_a_reference(prompts: list[list[int]]) -> list[TokenisedPair]:
    """For each prompt the lengths of its replies; the first is preferred to each other one."""
    return [
        TokenisedPair(0, [100 + number, 1], [2] * replies[0], [3 + other] * length)
        for number, replies in enumerate(prompts)
        for other, length in enumerate(replies[1:])
    ]


@settings(max_examples=50)
@given(PROMPT_LENGTHS, st.integers(64, 200), st.integers(1, 20), st.integers(0, 3))
def test_an_epoch_has_every_pair_within_limits(
    prompts: list[list[int]], budget: int, most: int, epoch: int
) -> None:
    pairs = pairs_against_a_reference(prompts)
    limits = PairBatchConfig(token_budget=budget, min_pairs=1, max_pairs=most)
    batches = PromptBatches(pairs, limits, seed=5).epoch(epoch)
    assert sorted(row for batch in batches for row in batch) == list(range(len(pairs)))
    for batch in batches:
        of_batch = [pairs[row] for row in batch]
        tokens = len(pair_sequences(of_batch).distinct) * max(pair.length for pair in of_batch)
        assert len(batch) == 1 or (tokens <= budget and len(batch) <= most)
    assert batches == PromptBatches(pairs, limits, seed=5).epoch(epoch)


@settings(max_examples=50)
@given(PROMPT_LENGTHS, st.integers(8, 200), st.integers(1, 8), st.integers(0, 8), st.integers(0, 3))
def test_no_batch_of_whole_prompts_has_too_many_pairs(
    prompts: list[list[int]], budget: int, fewest: int, more: int, epoch: int
) -> None:
    """Whatever the budget, a batch has at most ``max_pairs`` pairs, and all but few have
    ``min_pairs``.
    """
    pairs = pairs_against_a_reference(prompts)
    limits = PairBatchConfig(
        token_budget=budget, min_pairs=fewest, max_pairs=fewest + more, group_prompts=True
    )
    batches = PromptBatches(pairs, limits, seed=5).epoch(epoch)
    assert sorted(row for batch in batches for row in batch) == list(range(len(pairs)))
    assert max(map(len, batches)) <= fewest + more
    assert sum(len(batch) < fewest for batch in batches) <= 1


def test_pairs_of_a_prompt_stay_together_where_a_batch_holds_them() -> None:
    pairs = pairs_against_a_reference([[10] * 5 for _ in range(8)])
    # A prompt has five sequences of 12 tokens for its four pairs: two prompts fit 120 tokens.
    limits = PairBatchConfig(token_budget=120, min_pairs=1, max_pairs=64)
    batches = PromptBatches(pairs, limits, seed=1).epoch(0)
    assert [len(batch) for batch in batches] == [8] * 4
    assert all(len({pairs[row].prompt[0] for row in batch}) == 2 for batch in batches)
    assert batches != PromptBatches(pairs, limits, seed=1).epoch(1)
    assert [
        row
        for batch in PromptBatches(pairs, limits, seed=1).epoch(0, [3, 9])
        for row in sorted(batch)
    ] == [3, 9]


def test_a_prompt_with_more_pairs_than_a_batch_holds_is_cut() -> None:
    pairs = pairs_against_a_reference([[10] * 9])
    limits = PairBatchConfig(token_budget=60, min_pairs=2, max_pairs=64)
    # Five sequences of 12 tokens fit: the common one and four others.
    assert sorted(len(batch) for batch in PromptBatches(pairs, limits, seed=1).epoch(0)) == [4, 4]


@given(
    st.lists(st.tuples(*[st.lists(st.integers(1, 3), max_size=2)] * 3), max_size=8), st.booleans()
)
def test_sequences_are_numbered_in_order(
    rows: list[tuple[list[int], list[int], list[int]]], share: bool
) -> None:
    pairs = [TokenisedPair(i, *ids) for i, ids in enumerate(rows)]
    listed = [(p, c) for p, c, _ in rows] + [(p, r) for p, _, r in rows]
    expected = (
        [item for i, item in enumerate(listed) if item not in listed[:i]] if share else listed
    )
    sequences = pair_sequences(pairs, share)
    assert sequences.distinct == expected
    assert [
        sequences.distinct[number] for number in (*sequences.chosen, *sequences.rejected)
    ] == listed
    assert sequences.lengths == [len(prompt) + len(reply) for prompt, reply in expected]
