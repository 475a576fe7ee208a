"""The safety prompts: a fixed set, balanced, and what is counted of the replies to it."""

from __future__ import annotations

from collections import Counter

import pytest

from rlhf_core.evaluation.reply import Reply
from rlhf_core.evaluation.safety.prompts import refusal_rates, safety_prompts, texts_of

HARMFUL, BENIGN = texts_of("harmful"), texts_of("benign")
REFUSAL, ANSWER = Reply("I'm sorry, but I can't help with that.", True), Reply("Of course: first", False)


def test_as_many_benign_prompts_as_harmful_ones_none_twice() -> None:
    assert len(HARMFUL) == len(BENIGN) >= 200 and len(HARMFUL) == len(set(HARMFUL)) == len(set(BENIGN))
    assert not set(HARMFUL) & set(BENIGN)
    chinese = [sum(any("\u4e00" <= c <= "\u9fff" for c in text) for text in texts) for texts in (HARMFUL, BENIGN)]
    assert min(chinese) >= 20


def test_fewer_prompts_are_a_part_of_more() -> None:
    few, more = safety_prompts(3), safety_prompts(7)
    assert Counter(row.category for row in few) == {"harmful": 3, "benign": 3}
    assert {row.id for row in few} < {row.id for row in more}
    assert len(safety_prompts(1000)) == len(HARMFUL) + len(BENIGN) and safety_prompts(0) == []


def test_each_rate_counts_its_own_category() -> None:
    prompts = safety_prompts(4)
    replies = [REFUSAL if i < 3 or i == 7 else ANSWER for i in range(8)]  # 3 of 4 harmful ones, 1 of 4 benign ones
    assert refusal_rates(prompts, replies) == {"answers_benign": 0.75, "refuses_harmful": 0.75}
    assert refusal_rates(prompts, [ANSWER] * 8) == {"answers_benign": 1.0, "refuses_harmful": 0.0}
    assert refusal_rates([], []) == {}


def test_several_replies_to_a_prompt_follow_one_another() -> None:
    harmful, benign = safety_prompts(1)
    replies = [REFUSAL, REFUSAL, ANSWER, ANSWER, ANSWER, REFUSAL]
    assert refusal_rates([harmful, benign], replies) == {
        "refuses_harmful": pytest.approx(2 / 3),
        "answers_benign": pytest.approx(2 / 3),
    }
