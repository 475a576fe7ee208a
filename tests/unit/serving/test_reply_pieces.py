"""Pieces of a stream join to the whole reply and are never taken back."""

from __future__ import annotations

from typing import SupportsIndex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.serving.policy import ReplyPieces


@given(text=st.text("ab\n ", max_size=20), endings=st.lists(st.text("ab\n ", max_size=3), max_size=3))
def test_pieces_join_to_the_reply_whatever_is_held_back(text: str, endings: list[str]) -> None:
    reply = text[: min((text.find(ending) for ending in endings if ending and ending in text), default=len(text))]
    pieces = ReplyPieces("", endings)
    sent = [pieces.next(reply[:length]) for length in range(1, len(reply) + 1)]
    assert "".join(sent) + pieces.rest(reply) == reply


@pytest.mark.parametrize(
    ("lead", "endings", "texts", "sent"),
    [
        ("", [], ["a", "ab", "ab"], ["a", "b", ""]),
        ("", ["STOP"], ["x", "xS", "xST", "xSTa"], ["x", "", "", "STa"]),
        ("\n\n", [], ["\n", "a"], ["", "a"]),
        ("", [" "], ["a", "a ", "a b"], ["a", "", " b"]),
        ("", [], ["a", "b", "ac"], ["a", "", "c"]),
    ],
)
def test_what_may_not_be_part_of_the_reply_is_held_back(
    lead: str, endings: list[str], texts: list[str], sent: list[str]
) -> None:
    pieces = ReplyPieces(lead, endings)
    assert [pieces.next(text) for text in texts] == sent


class CountedSlices(str):
    """A text that counts how often a part of it is taken."""

    taken = 0

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        self.taken += 1
        return super().__getitem__(key)


def test_a_stop_string_far_longer_than_the_reply_costs_no_more_than_the_reply() -> None:
    ending = CountedSlices("z" * 1000)
    pieces = ReplyPieces("", [ending])
    assert [pieces.next(text) for text in ("a", "az", "azz")] == ["a", "", ""]
    assert ending.taken <= 1 + 2 + 3
