"""Batches of whole prompts, within the budget of distinct sequences, and rows of prompts with replies behind them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.config.reward import PairBatchConfig
from rlhf_core.data.pairs import MOST_REPLIES, PromptBatches, TokenisedPair, pair_sequences, rows_of_sequences

ids = st.lists(st.integers(5, 9), min_size=1, max_size=3)
LENGTHS = st.lists(st.lists(st.integers(2, 30), min_size=2, max_size=6), min_size=1, max_size=12)


def pairs_against_a_reference(prompts: list[list[int]]) -> list[TokenisedPair]:
    """For each prompt the lengths of its replies; the first is preferred to each other one."""
    return [
        TokenisedPair(0, [100 + number, 1], [2] * replies[0], [3 + other] * length)
        for number, replies in enumerate(prompts)
        for other, length in enumerate(replies[1:])
    ]


@settings(max_examples=50, deadline=None)
@given(LENGTHS, st.integers(64, 200), st.integers(1, 20), st.integers(0, 3))
def test_an_epoch_has_every_pair_once_within_the_limits(
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


def test_pairs_of_a_prompt_stay_together_where_a_batch_holds_them() -> None:
    pairs = pairs_against_a_reference([[10] * 5 for _ in range(8)])
    # A prompt has five sequences of 12 tokens for its four pairs: two prompts fit 120 tokens.
    limits = PairBatchConfig(token_budget=120, min_pairs=1, max_pairs=64)
    batches = PromptBatches(pairs, limits, seed=1).epoch(0)
    assert [len(batch) for batch in batches] == [8] * 4
    assert all(len({pairs[row].prompt[0] for row in batch}) == 2 for batch in batches)
    assert batches != PromptBatches(pairs, limits, seed=1).epoch(1)
    assert [row for batch in PromptBatches(pairs, limits, seed=1).epoch(0, [3, 9]) for row in sorted(batch)] == [3, 9]


def test_a_prompt_with_more_pairs_than_a_batch_holds_is_cut() -> None:
    pairs = pairs_against_a_reference([[10] * 9])
    limits = PairBatchConfig(token_budget=60, min_pairs=2, max_pairs=64)
    # Five sequences of 12 tokens fit: the common one and four others.
    assert sorted(len(batch) for batch in PromptBatches(pairs, limits, seed=1).epoch(0)) == [4, 4]


@given(st.lists(st.tuples(*[st.lists(st.integers(1, 3), max_size=2)] * 3), max_size=8), st.booleans())
def test_sequences_are_numbered_by_first_occurrence(
    rows: list[tuple[list[int], list[int], list[int]]], share: bool
) -> None:
    pairs = [TokenisedPair(i, *ids) for i, ids in enumerate(rows)]
    listed = [(p, c) for p, c, _ in rows] + [(p, r) for p, _, r in rows]
    expected = [item for i, item in enumerate(listed) if item not in listed[:i]] if share else listed
    sequences = pair_sequences(pairs, share)
    assert sequences.distinct == expected
    assert [sequences.distinct[number] for number in (*sequences.chosen, *sequences.rejected)] == listed
    assert sequences.lengths == [len(prompt) + len(reply) for prompt, reply in expected]


def test_the_replies_of_a_pair_stand_behind_one_prompt() -> None:
    pairs = [TokenisedPair(0, [1, 2], [3], [4, 5]), TokenisedPair(1, [6], [7], [8])]
    first, second = rows_of_sequences(pair_sequences(pairs), prefix_sharing=True)
    assert (first.prompt, first.replies, first.numbers, first.length) == ([1, 2], [[3], [4, 5]], [0, 2], 5)
    assert (second.prompt, second.replies, second.numbers, second.length) == ([6], [[7], [8]], [1, 3], 3)


def test_a_fifth_reply_to_a_prompt_begins_another_row() -> None:
    pairs = [TokenisedPair(i, [1], [2 * i + 10], [2 * i + 11]) for i in range(3)]
    rows = rows_of_sequences(pair_sequences(pairs), prefix_sharing=True)
    assert [len(row.replies) for row in rows] == [MOST_REPLIES, 2] == [4, 2]


@given(st.lists(st.tuples(ids, ids, ids), min_size=1, max_size=8), st.booleans(), st.booleans())
def test_every_sequence_is_in_one_row_behind_its_own_prompt(
    drawn: list[tuple[list[int], list[int], list[int]]], share: bool, prefix_sharing: bool
) -> None:
    sequences = pair_sequences([TokenisedPair(i, *row) for i, row in enumerate(drawn)], share)
    rows = rows_of_sequences(sequences, prefix_sharing)
    held = {number: (row.prompt, reply) for row in rows for number, reply in zip(row.numbers, row.replies, strict=True)}
    assert [held[number] for number in range(len(held))] == sequences.distinct
    assert sum(len(row.numbers) for row in rows) == len(sequences.distinct)
    if not prefix_sharing:
        assert [row.length for row in rows] == sequences.lengths
