"""Rows of prompts with the replies behind them: which sequences are in which."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.data.pairs import MOST_REPLIES, TokenisedPair, pair_sequences, rows_of_sequences

ids = st.lists(st.integers(5, 9), min_size=1, max_size=3)


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
