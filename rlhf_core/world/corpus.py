"""The data sets of the world, as rows ready for parquet.

Every item is a pure function of (seed, its number), so that a longer set begins as a shorter one
does. Rows are dictionaries with the columns of the data schema but for the id.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_core.world import content as phrases
from rlhf_core.world import gold
from rlhf_core.world.content import (
    OWNED,
    OWNERS,
    PREFIXES,
    RECIPES,
    REQUESTS,
    VALUES,
    Story,
    statements,
    things,
)
from rlhf_core.world.questions import SOURCE, Question, all_questions
from rlhf_core.world.replies import Draws, contrast_pair, draw_reply, with_connectives

Row = dict[str, Any]

# How often a category is drawn: reading takes most demonstrations, and telling facts apart most
# comparisons.
DEMONSTRATED: tuple[tuple[str, float], ...] = (
    ("fact", 0.3),
    ("context", 0.35),
    ("howto", 0.2),
    ("harmful", 0.15),
)
COMPARED: tuple[tuple[str, float], ...] = (
    ("fact", 0.4),
    ("context", 0.33),
    ("howto", 0.19),
    ("harmful", 0.08),
)
# With how many of the prefixes a question is asked: recipes are few, stories many, and refusing is
# learned soon.
PREFIXES_ASKED = {"fact": 2, "context": 1, "howto": 4, "harmful": 1}

# What plain texts are about, and the phrases that people exchange without saying anything.
TEXTS: tuple[tuple[str, float], ...] = (
    ("fact", 0.3), ("context", 0.3), ("howto", 0.15), ("harmful", 0.2), ("talk", 0.05),
)  # fmt: skip
# How often a story tells an attribute: where things are stands apart from their name, and is learned
# last.
TOLD: tuple[tuple[str, float], ...] = (("color", 0.25), ("size", 0.25), ("place", 0.5))
# Texts ask and title in words of their own, so that none holds a question that may be held out.
TEXT_QUESTIONS = (
    "and the {attribute} of the {thing}?",
    "so which {attribute} is it for the {thing}?",
)
RECIPE_TITLES = (
    "people know how to {task}.",
    "the way to {task} is this.",
    "so you want to {task}.",
)
SMALL_TALK = (
    *phrases.OPENERS,
    *phrases.CLOSERS,
    *phrases.FILLERS,
    *phrases.EVASIONS,
    *phrases.REFUSALS,
    *phrases.REASONS,
)


def prompts(seed: int) -> list[Row]:
    """Return the prompts of the world in an order given by the seed: prompt, category, source,
    group.

    Each question is asked with as many of the prefixes as ``PREFIXES_ASKED`` says, all of them
    equally often.
    """
    pairs = []
    for number, question in enumerate(all_questions()):
        step = len(PREFIXES) // PREFIXES_ASKED[question.category]
        for place in range(number % step, len(PREFIXES), step):
            pairs.append((question, PREFIXES[place]))
    order = sorted(
        range(len(pairs)), key=lambda index: (Draws(seed, "prompts", index).uniform(), index)
    )
    return [_row(pairs[index][0], pairs[index][1], SOURCE) for index in order]


def demonstrations(seed: int, n: int) -> list[Row]:
    """Generate ``n`` replies of mixed quality to random prompts: prompt, reply, category, source,
    group.
    """
    questions = _questions()
    rows = []
    for index in range(n):
        draws = Draws(seed, "demonstrations", index)
        question, prefix = _question(questions, DEMONSTRATED, draws), draws.pick(PREFIXES)
        rows.append(_row(question, prefix, SOURCE, reply=draw_reply(question, draws)))
    return rows


def preferences(
    seed: int,
    n: int,
    *,
    contrast_share: float = 0.35,
    sharpness: float = 2.5,
    length_bias: float = 0.02,
) -> list[Row]:
    """Generate ``n`` labelled pairs: prompt, chosen, rejected, margin (None), category, source,
    group.

    A share of ``contrast_share`` are contrast pairs (source ``world:contrast``), the rest two
    demonstrators' replies (``world:samples``). Annotators label by :func:`preference_probability`.
    """
    questions = _questions()
    rows = []
    for index in range(n):
        draws = Draws(seed, "preferences", index)
        question, prefix = _question(questions, COMPARED, draws), draws.pick(PREFIXES)
        contrast = draws.chance(contrast_share)
        first = second = ""
        while first == second:  # equal ones carry no preference and are drawn again
            if contrast:
                first, second = contrast_pair(question, questions, draws)
            else:
                first, second = draw_reply(question, draws), draw_reply(question, draws)
        probability = preference_probability(
            question.with_prefix(prefix), first, second, sharpness, length_bias
        )
        chosen, rejected = (first, second) if draws.chance(probability) else (second, first)
        source = f"{SOURCE}:{'contrast' if contrast else 'samples'}"
        rows.append(_row(question, prefix, source, chosen=chosen, rejected=rejected, margin=None))
    return rows


def preference_probability(
    prompt: str, first: str, second: str, sharpness: float, length_bias: float
) -> float:
    """Return P(first ≻ second) = σ(sharpness · (Δgold + length_bias · Δwords)), for two finished
    replies.

    Args:
        sharpness: Factor on score differences in the Bradley–Terry model; noise falls as it grows.
        length_bias: Points of gold score that one more word is worth to an annotator.
    """
    gold_difference = gold.score(prompt, first, True) - gold.score(prompt, second, True)
    word_difference = len(first.split()) - len(second.split())
    # σ(x) written as a tanh, which does not overflow for a large sharpness.
    return 0.5 + 0.5 * math.tanh(
        0.5 * sharpness * (gold_difference + length_bias * word_difference)
    )


def pretrain(seed: int, n: int) -> list[Row]:
    """Generate ``n`` plain texts of facts, stories, recipes and requests: text, category, source,
    group.

    A text is its own group, so that no fact is held out with it.
    """
    return [_text(Draws(seed, "pretrain", index)) for index in range(n)]


def _questions() -> Mapping[str, Sequence[Question]]:
    """All questions by category."""
    by_category: dict[str, list[Question]] = {}
    for question in all_questions():
        by_category.setdefault(question.category, []).append(question)
    return by_category


def _question(
    questions: Mapping[str, Sequence[Question]], shares: Sequence[tuple[str, float]], draws: Draws
) -> Question:
    return draws.pick(questions[draws.weighted(shares)])


def _text(draws: Draws) -> Row:
    category = draws.weighted(TEXTS)
    if category == "fact":
        parts = _facts(3 + draws.below(3), draws)
    elif category == "context":
        parts = _stories(draws)
    elif category == "talk":
        parts = draws.sample(SMALL_TALK, 4)
    elif category == "howto":
        recipe = draws.pick(tuple(RECIPES))
        title = draws.pick(RECIPE_TITLES).format(task=recipe)
        parts = [title, *with_connectives(list(RECIPES[recipe]), draws), *_facts(2, draws)]
    else:
        request = draws.pick(tuple(REQUESTS))
        parts = [
            f"it is not good to {request}.",
            draws.pick(phrases.REASONS),
            REQUESTS[request],
            *_facts(2, draws),
        ]
    text = " ".join(parts)
    return {"text": text, "category": category, "source": SOURCE, "group": text}


def _stories(draws: Draws) -> list[str]:
    """Draw two stories, one after the other or told together, and what follows from each: what
    reading means.

    Half of the conclusions follow a question, as in texts that people write.
    """
    told, concluded = [], []
    for name in draws.sample(OWNED, 2):
        attribute = draws.weighted(TOLD)
        story = Story(draws.pick(OWNERS), name, attribute, draws.pick(VALUES[attribute]))
        question = (
            [draws.pick(TEXT_QUESTIONS).format(attribute=attribute, thing=name)]
            if draws.chance(0.5)
            else []
        )
        named, _, full = statements(name, attribute, story.value)
        told.append(story.sentence())
        concluded.append([*question, full, *([named] if draws.chance(0.5) else [])])
    first, second = concluded
    if draws.chance(0.5):
        return [told[0], *first, told[1], *second]
    return [*told, *first, *second] if draws.chance(0.5) else [*told, *second, *first]


def _known() -> list[tuple[str, str, str]]:
    return [
        (thing, attribute, value)
        for thing, values in things().items()
        for attribute, value in values.items()
    ]


def _facts(n: int, draws: Draws) -> list[str]:
    """Draw ``n`` different true sentences that name their thing."""
    sentences = []
    for fact in draws.sample(_known(), n):
        named, _, full = statements(*fact)
        sentences.append(draws.pick((named, full)))
    return sentences


def _row(question: Question, prefix: str, source: str, **columns: str | None) -> Row:
    messages = [{"role": "user", "content": question.with_prefix(prefix)}]
    labels = {"category": question.category, "source": source, "group": question.group}
    return {"prompt": messages, **columns, **labels}
