"""Batches of whole prompts: every pair once per epoch, within the budget of distinct sequences."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.config.reward import PairBatchConfig
from rlhf_core.data.pairs import PromptBatches, TokenisedPair, pair_sequences

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
