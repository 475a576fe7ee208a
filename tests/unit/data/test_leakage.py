"""Leakage between splits: dialogues that begin alike, and prompts that are worded nearly alike."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from leakage_rows import dialogue, row, set_of
from validation_rows import make_row

from rlhf_core.config.data import NearDuplicatesConfig
from rlhf_core.data.splits import PairUser
from rlhf_core.data.validation.set_rows import beginning_hashes, prefix_leakage
from rlhf_core.data.validation.set_rules import similar_prompts

CONFIG = NearDuplicatesConfig(search=True)


def test_prompts_that_are_the_beginning_of_a_held_out_one_and_the_reverse() -> None:
    rows = set_of(
        preferences=[
            row("preferences", 0, "train", "Hello?"),  # begins the test dialogue
            row("preferences", 1, "train", "Hello?", "Hi.", "How  ARE you?", "Fine.", "Really?"),  # which begins this
            row("preferences", 2, "train", "Hello?", "Go away.", "Why?"),  # shares the first turn alone
            row("preferences", 3, "train", "Other?"),
            row("preferences", 4, "test", "hello?", "Hi.", "How are you?"),
        ],
        demonstrations=[row("demonstrations", 5, "train", "Hello?")],
        prompts=[row("prompts", 6, "test", "Nothing of the kind?")],
    )
    found, counts = prefix_leakage(rows)
    assert {(b.rule, b.kind, b.number) for b in found} == {
        ("no_prefix_leakage", "preferences", 0),
        ("no_prefix_leakage", "preferences", 1),
        ("no_prefix_leakage", "demonstrations", 0),
        ("no_shared_first_turn", "preferences", 0),
        ("no_shared_first_turn", "preferences", 1),
        ("no_shared_first_turn", "preferences", 2),
        ("no_shared_first_turn", "demonstrations", 0),
    }
    test_id = make_row("preferences", 4, prompt=dialogue("hello?", "Hi.", "How are you?"))["id"]
    assert {b.other for b in found} == {test_id}
    assert "split test" in found[0].reason
    assert counts["preferences"] == {"test_prefix_leaks": 1, "test_first_turn_leaks": 1}
    assert counts["prompts"] == {"test_prefix_leaks": 0, "test_first_turn_leaks": 0}


def test_the_judges_pairs_are_held_out_from_the_reward_models() -> None:
    rows = set_of(
        preferences=[
            row("preferences", 0, "train", "A?", user=PairUser.REWARD),
            row("preferences", 1, "train", "A?", "B.", "C?", user=PairUser.JUDGE),
        ]
    )
    prefix = [b for b in prefix_leakage(rows)[0] if b.rule == "no_prefix_leakage"]
    assert [(b.number, b.reason.count("the judge's pairs")) for b in prefix] == [(0, 1)]


def test_turns_are_told_apart_by_where_they_end() -> None:
    assert beginning_hashes(["ab", "c", "d"])[1:] != beginning_hashes(["a", "bc", "d"])[1:]
    assert len(beginning_hashes(["a", "b", "c", "d"])) == 2, "a beginning ends with the user's turn"


@given(st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=5), min_size=1, max_size=12), st.randoms())
def test_against_a_comparison_of_all_pairs(dialogues: list[list[str]], random: Any) -> None:
    odd = [turns if len(turns) % 2 else [*turns, "x"] for turns in dialogues]
    splits = [random.choice(["train", "test"]) for _ in odd]
    rows = set_of(
        demonstrations=[row("demonstrations", i, s, *t) for i, (s, t) in enumerate(zip(splits, odd, strict=True))]
    )
    held_out = [t for s, t in zip(splits, odd, strict=True) if s == "test"]
    expected = {
        i
        for i, (s, t) in enumerate(zip(splits, odd, strict=True))
        if s == "train" and any(t == h[: len(t)] or h == t[: len(h)] for h in held_out)
    }
    assert {b.number for b in prefix_leakage(rows)[0] if b.rule == "no_prefix_leakage"} == expected


LONG = "Please explain to me in simple terms how the tides of the sea are made by the moon and the sun together"


def test_prompts_that_are_worded_nearly_alike() -> None:
    rows = set_of(
        preferences=[
            row("preferences", 0, "train", f"{LONG} today?"),
            row("preferences", 1, "train", "How do I bake a loaf of bread with no yeast in an hour or two?"),
            row("preferences", 2, "test", f"{LONG.upper()}?"),
            row("preferences", 3, "train", f"{LONG} tomorrow?", user=PairUser.JUDGE),
        ]
    )
    found = list(similar_prompts(rows, CONFIG))
    # Both resemble the test prompt. The judge's are held out from the reward model's, so row 0 resembles row 3 too.
    assert [(b.number, b.reason.rpartition(" of ")[2]) for b in found] == [
        (0, "split test"),
        (3, "split test"),
        (0, "the judge's pairs"),
    ]
    assert all(0.8 <= (b.similarity or 0) < 1 for b in found)


def test_equal_prompts_of_one_group_are_no_matter_of_similarity() -> None:
    rows = set_of(
        preferences=[row("preferences", i, "train", f"{LONG}?") for i in range(3)],
        prompts=[row("prompts", 9, "train", f"{LONG}?")],
    )
    assert not list(similar_prompts(rows, CONFIG))


@pytest.mark.parametrize("limit", [1, 2])
def test_no_more_prompts_are_compared_than_max_rows(limit: int) -> None:
    rows = set_of(prompts=[row("prompts", 0, "test", f"{LONG}?"), row("prompts", 1, "train", f"{LONG} now?")])
    found = list(similar_prompts(rows, CONFIG.model_copy(update={"max_rows": limit})))
    assert len(found) == limit - 1
