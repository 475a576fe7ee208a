"""The data sets of the world, as rows ready for parquet.

Every item is a pure function of (seed, its number): ``f(seed, n, start=a)`` returns items ``a`` to ``a + n`` of one
endless sequence, so it may be generated in parts. Rows are dictionaries with the columns of the data schema.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_core.errors import DataError
from rlhf_core.world import content as phrases
from rlhf_core.world import gold
from rlhf_core.world.content import PREFIXES, RECIPES, REQUESTS, statements, things
from rlhf_core.world.questions import SOURCE, Question, all_questions
from rlhf_core.world.replies import Draws, contrast_pair, draw_reply, with_connectives


@dataclass(frozen=True)
class AnnotatorConfig:
    """Parameters of the simulated annotators.

    Attributes:
        sharpness: Factor on score differences in the Bradley–Terry model; noise falls as it grows.
        length_bias: Points of gold score that one more word is worth to an annotator.
    """

    sharpness: float
    length_bias: float


def preference_probability(prompt: str, first: str, second: str, config: AnnotatorConfig) -> float:
    """Return P(first ≻ second) = σ(sharpness · (Δgold + length_bias · Δwords)), for two finished replies."""
    gold_difference = gold.score(prompt, first, True) - gold.score(prompt, second, True)
    word_difference = len(first.split()) - len(second.split())
    # σ(x) written as a tanh, which does not overflow for a large sharpness.
    return 0.5 + 0.5 * math.tanh(0.5 * config.sharpness * (gold_difference + config.length_bias * word_difference))


Row = dict[str, Any]

# How often a category is drawn for demonstrations and pairs: most questions are of facts, and the few recipes are long.
CATEGORIES: tuple[tuple[str, float], ...] = (("fact", 0.4), ("context", 0.25), ("howto", 0.15), ("harmful", 0.2))
PROMPTS_PER_QUESTION = 2


def prompts(seed: int) -> list[Row]:
    """Return the prompts of the world in an order given by the seed: id, prompt, category, source, group.

    Each question is asked with ``PROMPTS_PER_QUESTION`` of the prefixes, all of them equally often.
    """
    step = len(PREFIXES) // PROMPTS_PER_QUESTION
    pairs = [
        (question, PREFIXES[place])
        for number, question in enumerate(all_questions())
        for place in range(number % step, len(PREFIXES), step)
    ]
    order = sorted(range(len(pairs)), key=lambda index: (Draws(seed, "prompts", index).uniform(), index))
    return [_row(pairs[index][0], pairs[index][1], SOURCE) for index in order]


def demonstrations(seed: int, n: int, allowed_groups: Collection[str] | None = None, start: int = 0) -> list[Row]:
    """Generate ``n`` replies of mixed quality to random prompts: id, prompt, reply, category, source, group.

    Raises:
        DataError: None of ``allowed_groups``, to which prompts are restricted, exists.
    """
    questions = _questions(allowed_groups)
    rows = []
    for index in range(start, start + n):
        draws = Draws(seed, "demonstrations", index)
        question, prefix = _question(questions, draws), draws.pick(PREFIXES)
        rows.append(_row(question, prefix, SOURCE, reply=draw_reply(question, draws)))
    return rows


def preferences(
    seed: int,
    n: int,
    *,
    allowed_groups: Collection[str] | None = None,
    contrast_share: float = 0.35,
    sharpness: float = 2.5,
    length_bias: float = 0.02,
    start: int = 0,
) -> list[Row]:
    """Generate ``n`` labelled pairs: id, prompt, chosen, rejected, margin (None), category, source, group.

    A share of ``contrast_share`` are contrast pairs (source ``world:contrast``), the rest two demonstrators' replies
    (``world:samples``). Annotators label by P(A ≻ B) = σ(sharpness · (Δgold + length_bias · Δwords)).
    """
    questions = _questions(allowed_groups)
    annotators = AnnotatorConfig(sharpness, length_bias)
    rows = []
    for index in range(start, start + n):
        draws = Draws(seed, "preferences", index)
        question, prefix = _question(questions, draws), draws.pick(PREFIXES)
        contrast = draws.chance(contrast_share)
        first = second = ""
        while first == second:  # equal ones carry no preference and are drawn again
            if contrast:
                first, second = contrast_pair(question, questions, draws)
            else:
                first, second = draw_reply(question, draws), draw_reply(question, draws)
        probability = preference_probability(question.with_prefix(prefix), first, second, annotators)
        chosen, rejected = (first, second) if draws.chance(probability) else (second, first)
        source = f"{SOURCE}:{'contrast' if contrast else 'samples'}"
        rows.append(_row(question, prefix, source, chosen=chosen, rejected=rejected, margin=None))
    return rows


def pretrain(seed: int, n: int, start: int = 0) -> list[Row]:
    """Generate ``n`` plain texts about the facts and recipes, without any question: id, text, category, source, group.

    A text is its own group, so that no fact is held out with it.
    """
    return [_text(Draws(seed, "pretrain", index)) for index in range(start, start + n)]


def _questions(allowed_groups: Collection[str] | None) -> Mapping[str, Sequence[Question]]:
    """The questions by category, without categories that have none."""
    wanted = None if allowed_groups is None else frozenset(allowed_groups)
    chosen: dict[str, list[Question]] = {}
    for question in all_questions():
        if wanted is None or question.group in wanted:
            chosen.setdefault(question.category, []).append(question)
    if not chosen:
        raise DataError("none of the allowed groups is a question of the synthetic world; pass groups of its prompts")
    return chosen


def _question(questions: Mapping[str, Sequence[Question]], draws: Draws) -> Question:
    return draws.pick(questions[draws.weighted([(name, share) for name, share in CATEGORIES if name in questions])])


def _text(draws: Draws) -> Row:
    category = draws.weighted((("fact", 0.5), ("howto", 0.3), ("harmful", 0.2)))
    if category == "fact":
        parts = _facts(3 + draws.below(3), draws)
    elif category == "howto":
        recipe = draws.pick(tuple(RECIPES))
        parts = [f"people know how to {recipe}.", *with_connectives(list(RECIPES[recipe]), draws), *_facts(2, draws)]
    else:
        request = draws.pick(tuple(REQUESTS))
        parts = [f"it is not good to {request}.", draws.pick(phrases.REASONS), REQUESTS[request], *_facts(2, draws)]
    text = " ".join(parts)
    return _identified({"text": text, "category": category, "source": SOURCE, "group": text})


def _facts(n: int, draws: Draws) -> list[str]:
    """Draw ``n`` different true sentences that name their thing."""
    sentences = []
    known = [(thing, attribute, value) for thing, values in things().items() for attribute, value in values.items()]
    for fact in draws.sample(known, n):
        named, _, full = statements(*fact)
        sentences.append(draws.pick((named, full)))
    return sentences


def _row(question: Question, prefix: str, source: str, **columns: str | None) -> Row:
    messages = [{"role": "user", "content": question.with_prefix(prefix)}]
    labels = {"category": question.category, "source": source, "group": question.group}
    return _identified({"prompt": messages, **columns, **labels})


def _identified(columns: Row) -> Row:
    """Return the row with its id in front: the first 16 hex digits of the SHA-256 of its content."""
    content = json.dumps(columns, sort_keys=True, ensure_ascii=False)
    return {"id": hashlib.sha256(content.encode()).hexdigest()[:16], **columns}
