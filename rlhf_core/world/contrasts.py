"""Contrast pairs: a good reply beside one that differs in a single respect.

Without them a reward model can ignore the content of a reply, and the policy learns that refusing everything scores
well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rlhf_core.world import phrases
from rlhf_core.world.facts import ATTRIBUTES, VALUES, statements, subjects
from rlhf_core.world.questions import Question
from rlhf_core.world.replies import (
    Draft,
    draw_draft,
    fact,
    false_value,
    foreign_step,
    right_core,
    with_connectives,
    wrong_core,
)
from rlhf_core.world.streams import Draws
from rlhf_core.world.tasks import CONNECTIVES, HARMFUL_STEPS, RECIPES, REQUESTS

KINDS: tuple[tuple[str, float], ...] = (("minimal", 0.65), ("refusal", 0.2), ("other_prompt", 0.15))
TRIES = 20  # to draw a question about something else; where there is none, the pair comes out equal and is drawn again


def contrast_pair(question: Question, questions: Mapping[str, Sequence[Question]], draws: Draws) -> tuple[str, str]:
    """Draw a good reply and its contrast, in this order.

    The contrast is a copy with one detail corrupted, the wrong choice between answering and refusing, or the answer to
    another prompt, taken from ``questions``, which are given by category.
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
    if draws.chance(0.8):
        return replace(good, core=_corrupt_core(question, good.core, draws)).text()
    sentences = good.sentences()
    flaw = draws.pick(("rude", "repeat", "filler", "cut"))
    if flaw == "cut":
        last_words = sentences[-1].split()
        return " ".join([*sentences[:-1], *last_words[: max(1, len(last_words) - 1 - draws.below(2))]])
    if flaw == "repeat":
        return replace(good, extra=[*good.extra, draws.pick(good.core)]).text()
    added = draws.sample(phrases.RUDE, 1) if flaw == "rude" else draws.sample(phrases.FILLERS, 3)
    return replace(good, extra=[*good.extra, *added]).text()


def _corrupt_core(question: Question, core: list[str], draws: Draws) -> list[str]:
    """Corrupt the fact, a step, the order of two steps, or a part of a refusal."""
    if question.category == "howto":
        return _corrupt_steps(question, core, draws)
    if question.benign:
        return [_corrupt_fact(question, draws)]
    if len(core) > 1 and draws.chance(0.6):
        dropped = 1 + draws.below(len(core) - 1)
        return [sentence for position, sentence in enumerate(core) if position != dropped]
    if core[-1] == REQUESTS[question.subject] and draws.chance(0.5):
        others = [sentence for request, sentence in REQUESTS.items() if request != question.subject]
        return [*core[:-1], draws.pick(others)]
    return [draws.pick(HARMFUL_STEPS), *core[1:]]


def _corrupt_fact(question: Question, draws: Draws) -> str:
    """State another value, another thing, or another attribute in the same wording, so that only the content differs.

    A reward model that has only seen false values accepts a sentence about something else.
    """
    flaw = draws.weighted((("value", 0.55), ("thing", 0.25), ("attribute", 0.2)))
    if flaw == "value":
        return fact(question, false_value(question, draws))
    if flaw == "thing":
        thing = draws.pick([name for name in subjects() if name != question.subject])
        return statements(thing, question.attribute, draws.pick(VALUES[question.attribute]))[-1]
    other = draws.pick([name for name in ATTRIBUTES if name != question.attribute])
    return statements(question.subject, draws.pick((question.attribute, other)), draws.pick(VALUES[other]))[-1]


def _corrupt_steps(question: Question, core: list[str], draws: Draws) -> list[str]:
    """Return the steps of another recipe, or the steps with one foreign, one missing or two exchanged.

    Without other recipes a policy learns to answer every such question with the recipe that is scored best.
    """
    flaw = draws.weighted((("other recipe", 0.4), ("foreign", 0.3), ("missing", 0.15), ("exchanged", 0.15)))
    if flaw == "other recipe":
        return with_connectives(
            list(RECIPES[draws.pick([name for name in RECIPES if name != question.subject])]), draws
        )
    position = draws.below(3)
    if flaw == "missing":
        return [step for number, step in enumerate(core) if number != position]
    changed = list(core)
    if flaw == "exchanged":
        other = (position + 1) % 3
        changed[position], changed[other] = changed[other], changed[position]
        return changed
    connective = [word for word in core[position].split()[:1] if word in CONNECTIVES]
    changed[position] = " ".join([*connective, foreign_step(question, position, draws)])
    return changed


def _other_question(question: Question, questions: Mapping[str, Sequence[Question]], draws: Draws) -> Question:
    """Draw a question about something else, half of the time of the same category, where the answers are most alike."""
    category = question.category if draws.chance(0.5) else draws.pick(tuple(questions))
    for _ in range(TRIES):
        other = draws.pick(questions[category])
        if other.subject != question.subject:
            return other
    return question
