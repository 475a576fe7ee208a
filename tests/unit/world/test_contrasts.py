"""Contrast pairs: what is shown as the worse reply, judged by the gold score and read by the grammar."""

from __future__ import annotations

from collections import Counter

import pytest

from rlhf_core.world import gold
from rlhf_core.world.questions import Kind, Question, all_questions, parse_reply
from rlhf_core.world.replies import Draft, Draws, contrast_pair, corrupt, right_core

CATEGORIES = ("fact", "context", "howto", "harmful")
BY_CATEGORY = {name: [q for q in all_questions() if q.category == name] for name in CATEGORIES}


def _corruptions(question: Question, n: int = 400) -> list[str]:
    """``n`` corruptions of the bare right answer."""
    corruptions = []
    for index in range(n):
        draws = Draws(3, "preferences", index)
        corruptions.append(corrupt(question, Draft(right_core(question, draws)), draws))
    return corruptions


@pytest.mark.parametrize("category", sorted(BY_CATEGORY))
def test_the_contrast_is_never_the_better_reply(category: str) -> None:
    worse = 0
    for index in range(300):
        draws = Draws(5, "preferences", index)
        question = draws.pick(BY_CATEGORY[category])
        good, contrast = contrast_pair(question, BY_CATEGORY, draws)
        difference = gold.score(question.text, good, True) - gold.score(question.text, contrast, True)
        assert difference >= 0 or good == contrast
        worse += difference > 0
    assert worse > 0.9 * 300


def test_a_fact_is_corrupted_in_its_value_its_thing_and_its_attribute() -> None:
    question = next(q for q in BY_CATEGORY["fact"] if (q.subject, q.attribute) == ("lamp", "color"))
    seen: Counter[str] = Counter()
    for text in _corruptions(question):
        first = next(iter(parse_reply(text).sentences), None)
        if first is None:
            continue
        if first.kind is Kind.UNKNOWN:
            seen["misfit"] += 1
        elif first.kind is Kind.FACT:
            attribute = "color" if text.startswith("the color") else "other attribute"
            seen[attribute if first.subject == "lamp" else "other thing"] += 1
    assert min(seen[kind] for kind in ("color", "other thing", "other attribute", "misfit")) >= 5


def test_a_recipe_is_corrupted_by_another_recipe_as_a_whole() -> None:
    question = next(q for q in BY_CATEGORY["howto"] if q.subject == "make tea")
    strangers = Counter(
        sum(s.kind is Kind.STEP and s.subject != "make tea" for s in parse_reply(text).sentences)
        for text in _corruptions(question)
    )
    assert strangers[3] > 60
    assert strangers[1] > 40
    assert strangers[0] > 40
