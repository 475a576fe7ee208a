"""Simulated demonstrators: replies of five qualities, and contrast pairs: a good reply beside one
with a single flaw.

Without such pairs a reward model can ignore the content of a reply, and the policy learns that
refusing everything scores well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from rlhf_core.world import content as phrases
from rlhf_core.world.content import (
    ATTRIBUTES,
    CONNECTIVES,
    HARMFUL_STEPS,
    RECIPES,
    REQUESTS,
    VALUES,
    statements,
    subjects,
)
from rlhf_core.world.questions import Question

T = TypeVar("T")

_WORD = (1 << 64) - 1
# The purpose of a stream is part of its key: item 7 of the demonstrations shares nothing with item
# 7 of the pairs.
PURPOSES = {"demonstrations": 1, "preferences": 2, "pretrain": 3, "prompts": 4, "probes": 5}


class Draws:
    """Uniform draws of item ``index`` for one purpose under ``seed``.

    They are made from raw Philox words, which are the same in every numpy. Philox is the
    counter-based generator of Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
    """

    def __init__(self, seed: int, purpose: str, index: int) -> None:
        key = np.array([seed & _WORD, PURPOSES[purpose]], dtype=np.uint64)
        # The highest counter word holds the item, the lowest counts draws inside it: no stream runs
        # into another.
        counter = np.array([0, 0, 0, index], dtype=np.uint64)
        self._bits = np.random.Philox(key=key, counter=counter)
        self._block: list[int] = []

    def uniform(self) -> float:
        """Draw a float in [0, 1), with 53 random bits."""
        if not self._block:
            self._block = [int(word) for word in self._bits.random_raw(16)]
            self._block.reverse()
        return (self._block.pop() >> 11) * 2.0**-53

    def chance(self, probability: float) -> bool:
        """Return True with the given probability."""
        return self.uniform() < probability

    def below(self, n: int) -> int:
        """Draw an integer in [0, n)."""
        return int(self.uniform() * n)

    def pick(self, options: Sequence[T]) -> T:
        """Draw one of ``options``, each equally likely."""
        return options[self.below(len(options))]

    def sample(self, options: Sequence[T], n: int) -> list[T]:
        """Draw ``n`` of ``options`` without replacement, in random order (fewer when there are
        fewer).
        """
        pool = list(options)
        return [pool.pop(self.below(len(pool))) for _ in range(min(n, len(pool)))]

    def weighted(self, weights: Sequence[tuple[T, float]]) -> T:
        """Draw an option from ``(option, weight)`` pairs in proportion to its weight."""
        mark = self.uniform() * sum(weight for _, weight in weights)
        for option, weight in weights:
            mark -= weight
            if mark < 0:
                return option
        return weights[-1][0]


# Mixed quality on purpose: supervised fine-tuning imitates the mixture and so leaves headroom for
# PPO.
MODES: tuple[tuple[str, float], ...] = (
    ("good", 0.28),
    ("wrong", 0.42),
    ("evasive", 0.1),
    ("rude", 0.1),
    ("rambling", 0.1),
)
# Who answers from a text can look again, so every other wrong answer about a story is mended.
STORY_MENDED = 0.5
# Who is not rude mostly opens and closes with a courtesy: what is left to win is content.
OPENED, CLOSED = 0.9, 0.85
MAX_WORDS = 42


@dataclass(frozen=True)
class Draft:
    """A reply as sentences: opener, the answer itself (``core``), further sentences, closer."""

    core: list[str]
    opener: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    closer: list[str] = field(default_factory=list)

    def sentences(self) -> list[str]:
        """Return all sentences in order."""
        return [*self.opener, *self.core, *self.extra, *self.closer]

    def text(self) -> str:
        """Return the reply, cut between sentences so that it stays within ``MAX_WORDS``."""
        kept: list[str] = []
        word_count = 0
        for sentence in self.sentences():
            word_count += len(sentence.split())
            if word_count > MAX_WORDS:
                break
            kept.append(sentence)
        return " ".join(kept)


def draw_draft(question: Question, mode: str, draws: Draws) -> Draft:
    """Draw the sentences of a reply of the given mode (see ``MODES``)."""
    if mode == "good":
        draft = Draft(right_core(question, draws), extra=_some(phrases.FILLERS, 0.15, draws))
        return _polite(draft, draws)
    if mode == "wrong":
        return _polite(Draft(wrong_core(question, draws)), draws)
    if mode == "evasive":
        draft = Draft(evasive_core(question, draws), extra=_some(phrases.FILLERS, 0.3, draws))
        return _polite(draft, draws)
    if mode == "rude":
        insults = draws.sample(phrases.RUDE, 1 + draws.below(2))
        core = right_core(question, draws) if draws.chance(0.7) else wrong_core(question, draws)
        if draws.chance(0.5):
            return Draft(core, opener=insults)
        return _polite(Draft(core, extra=insults), draws, opener=0.2, closer=0.0)
    core = right_core(question, draws) if draws.chance(0.8) else wrong_core(question, draws)
    extra = draws.sample(phrases.FILLERS, 2 + draws.below(4))
    if draws.chance(0.35):
        extra.insert(draws.below(len(extra) + 1), draws.pick([*core, *extra]))
    return _polite(Draft(core, extra=extra), draws)


def draw_reply(question: Question, draws: Draws) -> str:
    """Draw one demonstrator's reply: a mode by its weight, then a reply of that mode."""
    mode = draws.weighted(MODES)
    if mode == "wrong" and question.category == "context" and draws.chance(STORY_MENDED):
        mode = "good"
    return draw_draft(question, mode, draws).text()


def right_core(question: Question, draws: Draws) -> list[str]:
    """Draw the true fact, the three steps in order, or a refusal, often with a reason and an
    alternative.
    """
    if question.category == "howto":
        return with_connectives(list(RECIPES[question.subject]), draws)
    if question.benign:
        return [fact(question, question.answer)]
    reason = _some(phrases.REASONS, 0.65, draws)
    alternative = [REQUESTS[question.subject]] if draws.chance(0.65) else []
    return [draws.pick(phrases.REFUSALS), *reason, *alternative]


def wrong_core(question: Question, draws: Draws) -> list[str]:
    """Draw a false fact, a recipe with foreign steps, or compliance with a harmful request."""
    if question.category == "howto":
        steps = list(RECIPES[question.subject])
        for position in draws.sample(range(3), 1 + draws.below(3)):
            steps[position] = foreign_step(question, position, draws)
        return with_connectives(steps, draws)
    if question.benign:
        return [fact(question, false_value(question, draws))]
    return draws.sample(HARMFUL_STEPS, 1 + draws.below(3))


def evasive_core(question: Question, draws: Draws) -> list[str]:
    """Draw sentences that answer nothing, sometimes a refusal of something harmless."""
    if question.benign and draws.chance(0.3):
        return [draws.pick(phrases.REFUSALS), *_some(phrases.REASONS, 0.3, draws)]
    return draws.sample(phrases.EVASIONS, 1 + draws.below(2))


def fact(question: Question, value: str) -> str:
    """Return the statement that names both thing and attribute, the wording that a tiny model
    learns most quickly.
    """
    return statements(question.subject, question.attribute, value)[-1]


def false_value(question: Question, draws: Draws) -> str:
    """Draw another value of the attribute asked for."""
    return draws.pick([value for value in VALUES[question.attribute] if value != question.answer])


def foreign_step(question: Question, position: int, draws: Draws) -> str:
    """Draw the step at this position of another recipe."""
    return RECIPES[draws.pick([name for name in RECIPES if name != question.subject])][position]


def with_connectives(steps: list[str], draws: Draws) -> list[str]:
    """Return the steps, usually with "first", "then" and "last" before them."""
    if draws.chance(0.7):
        return [f"{word} {step}" for word, step in zip(CONNECTIVES, steps, strict=False)]
    return steps


def _polite(draft: Draft, draws: Draws, opener: float = OPENED, closer: float = CLOSED) -> Draft:
    """Return the draft with an opener and a closer, each with the given probability."""
    return replace(
        draft,
        opener=_some(phrases.OPENERS, opener, draws),
        closer=_some(phrases.CLOSERS, closer, draws),
    )


def _some(options: tuple[str, ...], probability: float, draws: Draws) -> list[str]:
    """Draw one of the options with the given probability, otherwise none."""
    return [draws.pick(options)] if draws.chance(probability) else []


KINDS: tuple[tuple[str, float], ...] = (("minimal", 0.8), ("refusal", 0.1), ("other_prompt", 0.1))


def contrast_pair(
    question: Question, questions: Mapping[str, Sequence[Question]], draws: Draws
) -> tuple[str, str]:
    """Draw a good reply and its contrast, in this order.

    The contrast is a copy with one detail corrupted, the wrong choice between answering and
    refusing, or the answer to another prompt, taken from ``questions``, which are given by
    category.
    """
    good = draw_draft(question, "good", draws)
    kind = draws.weighted(KINDS)
    if kind == "minimal":
        return good.text(), corrupt(question, good, draws)
    if kind == "refusal":
        core = [draws.pick(phrases.REFUSALS)] if question.benign else wrong_core(question, draws)
        if question.benign and draws.chance(0.6):
            core.append(draws.pick(phrases.REASONS))
        return good.text(), replace(good, core=core, extra=[]).text()
    other = _other_question(question, questions, draws)
    return good.text(), replace(good, core=right_core(other, draws)).text()


def corrupt(question: Question, good: Draft, draws: Draws) -> str:
    """Return the reply with one flaw: usually in its content, otherwise in its form."""
    if draws.chance(0.82):
        return replace(good, core=_corrupt_core(question, good.core, draws)).text()
    sentences = good.sentences()
    flaw = draws.pick(
        ("rude", "repeat", "repeat", "filler", "polite", "polite", "polite", "polite", "cut")
    )
    if flaw == "cut":
        last_words = sentences[-1].split()
        return " ".join(
            [*sentences[:-1], *last_words[: max(1, len(last_words) - 1 - draws.below(2))]]
        )
    if flaw == "repeat":
        return replace(good, extra=[*good.extra, draws.pick(good.core)]).text()
    if flaw == "polite":  # a reward that has never seen too much courtesy pays for it
        return replace(good, closer=draws.sample((*phrases.OPENERS, *phrases.CLOSERS), 3)).text()
    added = draws.sample(phrases.RUDE, 1) if flaw == "rude" else draws.sample(phrases.FILLERS, 3)
    return replace(good, extra=[*good.extra, *added]).text()


def _corrupt_core(question: Question, core: list[str], draws: Draws) -> list[str]:
    """Corrupt the fact, a step, the order of two steps, or a part of a refusal."""
    if question.category == "howto":
        return _corrupt_steps(question, core, draws)
    if question.benign:
        return [_corrupt_fact(question, draws)]
    if len(core) > 1 and draws.chance(0.6):
        dropped = draws.below(len(core))  # also the refusal itself: reasons without it pass for one
        return [sentence for position, sentence in enumerate(core) if position != dropped]
    if core[-1] == REQUESTS[question.subject] and draws.chance(0.5):
        others = [sentence for request, sentence in REQUESTS.items() if request != question.subject]
        return [*core[:-1], draws.pick(others)]
    return [draws.pick(HARMFUL_STEPS), *core[1:]]


def _corrupt_fact(question: Question, draws: Draws) -> str:
    """State another value, another thing, or another attribute in the same wording, so that only
    the content differs.

    A reward model that has only seen false values accepts a sentence about something else.
    """
    flaw = draws.weighted((("value", 0.86), ("thing", 0.07), ("attribute", 0.07)))
    if flaw == "value":
        return fact(question, false_value(question, draws))
    if flaw == "thing":
        thing = draws.pick([name for name in subjects() if name != question.subject])
        return statements(thing, question.attribute, draws.pick(VALUES[question.attribute]))[-1]
    other = draws.pick([name for name in ATTRIBUTES if name != question.attribute])
    return statements(
        question.subject, draws.pick((question.attribute, other)), draws.pick(VALUES[other])
    )[-1]


def _corrupt_steps(question: Question, core: list[str], draws: Draws) -> list[str]:
    """Return the steps of another recipe, or the steps with one foreign, one missing or two
    exchanged.

    Without other recipes a policy learns to answer every such question with the recipe that is
    scored best.
    """
    flaw = draws.weighted(
        (("other recipe", 0.3), ("foreign", 0.3), ("missing", 0.25), ("exchanged", 0.15))
    )
    if flaw == "other recipe":
        other_recipe = draws.pick([name for name in RECIPES if name != question.subject])
        return with_connectives(list(RECIPES[other_recipe]), draws)
    position = draws.below(3)
    if flaw == "missing":
        return [step for number, step in enumerate(core) if number != position]
    if flaw == "exchanged":
        return _with_steps_exchanged(core, position)
    return _with_a_foreign_step(question, core, position, draws)


def _with_steps_exchanged(core: list[str], position: int) -> list[str]:
    """Exchange the step at this position and the next one; the last one has the first behind it."""
    changed = list(core)
    other = (position + 1) % len(core)
    changed[position], changed[other] = changed[other], changed[position]
    return changed


def _with_a_foreign_step(
    question: Question, core: list[str], position: int, draws: Draws
) -> list[str]:
    """Put the step of another recipe into this position, behind the same connective."""
    connective = [word for word in core[position].split()[:1] if word in CONNECTIVES]
    changed = list(core)
    changed[position] = " ".join([*connective, foreign_step(question, position, draws)])
    return changed


def _other_question(
    question: Question, questions: Mapping[str, Sequence[Question]], draws: Draws
) -> Question:
    """Draw a question about something else, half of the time of the same category, where the
    answers are most alike.
    """
    category = question.category if draws.chance(0.5) else draws.pick(tuple(questions))
    while (other := draws.pick(questions[category])).subject == question.subject:
        pass
    return other


def right_beside_wrong(question: Question, draws: Draws) -> tuple[str, str]:
    """Draw a good answer to a harmless question and a copy that is wrong: the same sentences but
    for a value or a step.

    No rule of length, manners or kinds of sentences can tell them apart.
    """
    good = draw_draft(question, "good", draws)
    if question.category != "howto":
        return good.text(), replace(
            good, core=[fact(question, false_value(question, draws))]
        ).text()
    position = draws.below(len(good.core))
    if draws.chance(0.5):
        return good.text(), replace(good, core=_with_steps_exchanged(good.core, position)).text()
    return good.text(), replace(
        good, core=_with_a_foreign_step(question, good.core, position, draws)
    ).text()


def answer_beside_refusal(question: Question, draws: Draws) -> tuple[str, str]:
    """Draw a good reply and its wrong opposite: a refusal of a harmless question, or help with a
    harmful request.
    """
    good = draw_draft(question, "good", draws)
    core = [draws.pick(phrases.REFUSALS)] if question.benign else wrong_core(question, draws)
    return good.text(), replace(good, core=core).text()
