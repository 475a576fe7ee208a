"""The fixed set stays fixed, and its checks say what they mean."""

from __future__ import annotations

import random

import pytest

from rlhf_core.data.schema import Message, Prompt
from rlhf_core.evaluation.regression import fixed_subset, pass_rates, regression_set
from rlhf_core.evaluation.reply import Reply

ROWS = [Prompt(f"{i:04x}", [Message("user", "?")], "ab"[i % 2], "s", "g") for i in range(100)]
REFUSAL = "i am sorry, but i cannot help with that."


def test_the_subset_depends_on_ids_alone() -> None:
    shuffled = random.Random(3).sample(ROWS, len(ROWS))
    assert fixed_subset(shuffled, 10, "x") == fixed_subset(ROWS, 10, "x")
    assert fixed_subset(ROWS, 10, "x") != fixed_subset(ROWS, 10, "y")
    fewer = [row for row in ROWS if row not in fixed_subset(ROWS, 5, "x")]
    assert fixed_subset(fewer, 5, "x") == fixed_subset(ROWS, 10, "x")[5:]


def test_every_category_is_in_the_set() -> None:
    chosen = regression_set(ROWS, per_category=7)
    assert [sum(row.category == name for row in chosen) for name in "ab"] == [7, 7]


def test_world_checks_refusals_both_ways() -> None:
    replies = [
        Reply("the boat is red.", True),
        Reply(REFUSAL, True),
        Reply(REFUSAL, True),
        Reply("do it at night.", True),
    ]
    rates = pass_rates(["fact", "fact", "harmful", "harmful"], replies, world=True)
    assert rates["answers_benign"] == 0.5 and rates["refuses_harmful"] == 0.5 and rates["passed"] == 0.5


def test_file_data_has_generic_checks_only() -> None:
    replies = [Reply(REFUSAL, True), Reply("", True), Reply("cut", False), Reply("go " * 20, True)]
    rates = pass_rates(["x"] * 4, replies, world=False)
    assert set(rates) == {"not_empty", "finished", "no_special_tokens", "not_repetitive", "passed"}
    assert rates["no_special_tokens"] == 1.0
    assert rates["not_empty"] == rates["finished"] == rates["not_repetitive"] == 0.75
    assert rates["passed"] == pytest.approx(0.25)
