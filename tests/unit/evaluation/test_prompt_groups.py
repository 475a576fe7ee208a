"""Helpful and harmless apart: which prompt is in which group, and the comparisons within each by hand."""

from __future__ import annotations

import numpy as np
import pytest

from rlhf_core.data.schema import Prompt
from rlhf_core.evaluation.comparisons.comparison import compare_groups, compare_outcomes
from rlhf_core.evaluation.comparisons.opponents import group_of

from .conftest import made_prompt


def prompt_of(category: str, source: str = "a file") -> Prompt:
    return made_prompt("?", category, source)


@pytest.mark.parametrize(
    ("category", "source", "group"),
    [
        ("fact", "world", "helpful"),
        ("howto", "world", "helpful"),
        ("harmful", "world", "harmless"),
        ("safe", "pku", "harmless"),
        ("general", "/data/hh/harmless-base/test.jsonl.gz", "harmless"),
        ("general", "hub:Anthropic/hh-rlhf/helpful-online:test", "helpful"),
        ("general", "/helpful/hh_rlhf_harmless.sample.jsonl.gz", "harmless"),
        ("general", "unhelpful.jsonl", ""),
        ("satisfaction", "a file", ""),
        ("sums", "a file", "maths"),
        ("Red-team-attempts", "helpful", "harmless"),
    ],
)
def test_a_prompt_is_in_the_group_of_its_category_else_of_its_source(category: str, source: str, group: str) -> None:
    assert group_of(prompt_of(category, source), {"sums": "maths"}) == group


def test_a_default_can_be_changed_or_taken_away() -> None:
    assert group_of(prompt_of("howto"), {"howto": "recipes"}) == "recipes"
    assert group_of(prompt_of("howto"), {"howto": ""}) == ""


def test_comparisons_within_a_group_by_hand() -> None:
    outcome = {
        "gold": np.array([[1.0], [0.0], [0.5], [1.0]]),
        "llm": np.array([[1.0], [np.nan], [np.nan], [0.0]]),
        "silent": np.array([[np.nan], [1.0], [np.nan], [np.nan]]),
    }
    table = compare_groups(["helpful", "harmless", "helpful", ""], outcome, 100, 1)
    assert set(table) == {"helpful", "harmless"}, "a prompt of no group counts in none"
    gold = table["helpful"]["gold"]
    assert (gold["win"], gold["tie"], gold["lose"], gold["prompts"]) == (0.5, 0.5, 0.0, 2)
    assert gold == compare_outcomes([1.0, 0.5], 100, 1)
    assert table["helpful"]["llm"]["prompts"] == 1 and "silent" not in table["helpful"]
    assert set(table["harmless"]) == {"gold", "silent"} and table["harmless"]["gold"]["lose"] == 1.0


def test_several_replies_to_a_prompt_are_one_prompt() -> None:
    table = compare_groups(["helpful"] * 2, {"gold": np.array([[1.0, 1.0, 0.0], [0.5, 0.5, 0.5]])}, 100, 1)
    gold = table["helpful"]["gold"]
    assert gold["prompts"] == 2 and gold["win"] == 0.5 and gold["tie"] == 0.5
    assert gold["win_rate"] == pytest.approx((2 / 3 + 1 / 2) / 2)
