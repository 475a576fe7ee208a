"""The datasets: pure in the seed, split cleanly, labelled by imperfect annotators, with contrast
pairs.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from statistics import correlation, fmean
from typing import Any

import pytest

from rlhf_core.world import corpus, gold
from rlhf_core.world.content import PREFIXES
from rlhf_core.world.corpus import preference_probability
from rlhf_core.world.questions import Kind, Question, all_questions, content_of_group, parse_reply
from rlhf_core.world.replies import (
    MAX_WORDS,
    MODES,
    Draft,
    Draws,
    contrast_pair,
    corrupt,
    draw_draft,
    right_core,
)

Row = dict[str, Any]
MAKERS = [corpus.demonstrations, corpus.preferences, corpus.pretrain]


@pytest.fixture(scope="module")
def demonstrations() -> list[Row]:
    return corpus.demonstrations(7, 2000)


@pytest.fixture(scope="module")
def preferences() -> list[Row]:
    return corpus.preferences(7, 3000)


def text(row: Row) -> str:
    return str(row["prompt"][-1]["content"])


def split_of(group: str, seed: int) -> str:
    share = int(hashlib.sha256(f"split|{seed}|{group}".encode()).hexdigest()[:16], 16) / 2**64
    return "test" if share < 0.2 else "validation" if share < 0.3 else "train"


def without_prefix(prompt: str) -> str:
    prefix = max((prefix for prefix in PREFIXES if prompt.startswith(prefix)), key=len)
    return prompt[len(prefix) :].strip()


@pytest.mark.parametrize("make", MAKERS)
def test_pure_and_the_same_in_a_longer_set(make: Any) -> None:
    whole = make(3, 60)
    assert make(3, 60) == whole
    assert make(3, 20) == whole[:20]
    assert make(4, 60) != whole


def test_prompts_are_the_same_set_in_another_order() -> None:
    one, other = corpus.prompts(1), corpus.prompts(2)
    assert one == corpus.prompts(1)
    assert one != other
    assert {text(row) for row in one} == {text(row) for row in other}
    expected = sum(corpus.PREFIXES_ASKED[question.category] for question in all_questions())
    assert len({text(row) for row in one}) == len(one) == expected
    prefixes = Counter(text(row).removesuffix(without_prefix(text(row))).strip() for row in one)
    assert set(prefixes) == set(PREFIXES)
    assert len(set(prefixes.values())) == 1


def test_streams_are_independent_of_each_other() -> None:
    purposes = ("demonstrations", "preferences")
    first = {Draws(0, purpose, index).uniform() for purpose in purposes for index in range(500)}
    assert len(first) == 1000
    assert fmean(first) == pytest.approx(0.5, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2, 3, 11, 42, 1234, 99991])
def test_enough_held_out_prompts_and_none_of_them_in_training(seed: int) -> None:
    parts: dict[str, set[str]] = defaultdict(set)
    contents: dict[str, set[str]] = defaultdict(set)
    for row in corpus.prompts(seed):
        parts[split_of(row["group"], seed)].add(text(row))
        contents[split_of(row["group"], seed)].add(content_of_group(row["group"]))
    assert (
        len(parts["test"]) >= 256
        and len(parts["validation"]) >= 128
        and len(contents["test"]) >= 300
    )
    bare = {name: {without_prefix(prompt) for prompt in prompts} for name, prompts in parts.items()}
    assert not bare["train"] & bare["test"]
    assert not bare["train"] & bare["validation"]
    assert not bare["validation"] & bare["test"]


@pytest.mark.parametrize("seed", range(5))
def test_nearly_every_held_out_content_is_asked_for_in_training(seed: int) -> None:
    asked = [
        q for q in all_questions() if q.category != "context"
    ]  # context questions bring their facts along
    trained = {q.content for q in asked if split_of(q.group, seed) == "train"}
    assert len({q.content for q in asked} - trained) <= 1


def test_pretraining_text_holds_no_question_that_is_asked() -> None:
    texts = "\n".join(row["text"] for row in corpus.pretrain(0, 4000))
    assert not [question.text for question in all_questions() if question.text in texts]


def test_sizes(demonstrations: list[Row]) -> None:
    words = [len(row["reply"].split()) for row in demonstrations]
    assert 14 <= fmean(words) <= 20
    assert max(words) <= MAX_WORDS
    assert 9 <= fmean(len(text(row).split()) for row in demonstrations) <= 12
    vocabulary = {
        word.strip(".,?:")
        for row in demonstrations
        for word in f"{text(row)} {row['reply']}".split()
    }
    assert len(vocabulary) < 350


def test_quality_is_mixed_in_the_stated_order(demonstrations: list[Row]) -> None:
    means = {}
    for mode, _ in MODES:
        scores = []
        for index in range(600):
            draws = Draws(5, "demonstrations", index)
            question = draws.pick(all_questions())
            scores.append(gold.score(question.text, draw_draft(question, mode, draws).text(), True))
        means[mode] = fmean(scores)
    assert means["good"] > 0.8
    assert means["rambling"] < 0.4
    assert means["rude"] < 0.0
    assert means["evasive"] < 0.0
    assert means["wrong"] < -0.3
    scores = [gold.score(text(row), row["reply"], True) for row in demonstrations]
    assert 0.0 < fmean(scores) < 0.3
    words = [float(len(row["reply"].split())) for row in demonstrations]
    assert -0.1 < correlation(scores, words) < 0.25


def test_annotators_agree_with_gold_75_to_85_percent(preferences: list[Row]) -> None:
    scores = [
        [gold.score(text(row), row[side], True) for side in ("chosen", "rejected")]
        for row in preferences
    ]
    gaps = [chosen - rejected for chosen, rejected in scores]
    decided = [gap > 0 for gap in gaps if abs(gap) > 1e-9]
    assert 0.75 <= fmean(decided) <= 0.85
    assert len(decided) > 0.9 * len(gaps)


def test_contrast_share(preferences: list[Row]) -> None:
    shares = Counter(row["source"] for row in preferences)
    assert shares["world:contrast"] / len(preferences) == pytest.approx(0.35, abs=0.02)
    assert {row["source"] for row in corpus.preferences(0, 50, contrast_share=0.0)} == {
        "world:samples"
    }


def test_preference_probability_by_hand() -> None:
    prompt, right, wrong = (
        "what is the color of the lamp?",
        "the lamp is red.",
        "the lamp is quite blue.",
    )
    # Δgold = (1 + .4) / 1.4 = 1 (an unreadable sentence costs .4), Δwords = -1: σ(4 · (1 - .02)) =
    # σ(3.92)
    assert preference_probability(prompt, right, wrong, 4.0, 0.02) == pytest.approx(
        0.980544, abs=1e-6
    )
    assert preference_probability(prompt, wrong, right, 4.0, 0.02) == pytest.approx(
        1 - 0.980544, abs=1e-6
    )
    assert preference_probability(prompt, right, wrong, 1e6, 0.0) == 1.0
    assert preference_probability(prompt, right, right, 4.0, 0.02) == 0.5


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
        difference = gold.score(question.text, good, True) - gold.score(
            question.text, contrast, True
        )
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
