"""Simulated demonstrators: replies of five qualities to any question of the world."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from rlhf_core.world import phrases
from rlhf_core.world.facts import VALUES, statements
from rlhf_core.world.questions import Question
from rlhf_core.world.streams import Draws
from rlhf_core.world.tasks import CONNECTIVES, HARMFUL_STEPS, RECIPES, REQUESTS

# Mixed quality on purpose: supervised fine-tuning imitates the mixture and so leaves headroom for PPO.
MODES: tuple[tuple[str, float], ...] = (
    ("good", 0.42),
    ("wrong", 0.22),
    ("evasive", 0.12),
    ("rude", 0.12),
    ("rambling", 0.12),
)
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
        return _polite(draft, 0.75, 0.7, draws)
    if mode == "wrong":
        return _polite(Draft(wrong_core(question, draws)), 0.6, 0.5, draws)
    if mode == "evasive":
        draft = Draft(evasive_core(question, draws), extra=_some(phrases.FILLERS, 0.3, draws))
        return _polite(draft, 0.5, 0.4, draws)
    if mode == "rude":
        return _rude(question, draws)
    return _rambling(question, draws)


def draw_reply(question: Question, draws: Draws) -> str:
    """Draw one demonstrator's reply: a mode by its weight, then a reply of that mode."""
    return draw_draft(question, draws.weighted(MODES), draws).text()


def right_core(question: Question, draws: Draws) -> list[str]:
    """Draw the true fact, the three steps in order, or a refusal, often with a reason and an alternative."""
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
    """Return the statement that names both thing and attribute, the wording that a tiny model learns most quickly."""
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


def _rude(question: Question, draws: Draws) -> Draft:
    insults = draws.sample(phrases.RUDE, 1 + draws.below(2))
    core = right_core(question, draws) if draws.chance(0.7) else wrong_core(question, draws)
    if draws.chance(0.5):
        return Draft(core, opener=insults)
    return _polite(Draft(core, extra=insults), 0.2, 0.0, draws)


def _rambling(question: Question, draws: Draws) -> Draft:
    core = right_core(question, draws) if draws.chance(0.8) else wrong_core(question, draws)
    extra = draws.sample(phrases.FILLERS, 2 + draws.below(4))
    if draws.chance(0.35):
        extra.insert(draws.below(len(extra) + 1), draws.pick([*core, *extra]))
    return _polite(Draft(core, extra=extra), 0.5, 0.3, draws)


def _polite(draft: Draft, opener: float, closer: float, draws: Draws) -> Draft:
    """Return the draft with an opener and a closer, each with the given probability."""
    return replace(draft, opener=_some(phrases.OPENERS, opener, draws), closer=_some(phrases.CLOSERS, closer, draws))


def _some(options: tuple[str, ...], probability: float, draws: Draws) -> list[str]:
    """Draw one of the options with the given probability, otherwise none."""
    return [draws.pick(options)] if draws.chance(probability) else []
