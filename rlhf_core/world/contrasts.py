"""Contrast pairs: a good reply beside one that differs in a single respect.

Without them a learned reward never has to look at what is said, and the policy soon finds that refusing everything
pays.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    in_words,
    right_core,
    wrong_core,
)
from rlhf_core.world.streams import Draws
from rlhf_core.world.tasks import CONNECTIVES, HARMFUL_STEPS, RECIPES, REQUESTS

KINDS: tuple[tuple[str, float], ...] = (("minimal", 0.65), ("refusal", 0.2), ("other_prompt", 0.15))


def contrast_pair(question: Question, everyone: Sequence[Question], draws: Draws) -> tuple[str, str]:
    """A good reply and its contrast, in this order; ``everyone`` supplies other prompts to answer by mistake.

    The contrast is a copy with one detail corrupted, the wrong choice between answering and refusing, or the answer to
    another prompt.
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
    other = _other_question(question, everyone, draws)
    return good.text(), replace(good, core=right_core(other, draws)).text()


def corrupt(question: Question, good: Draft, draws: Draws) -> str:
    """The same reply with one thing wrong: usually what it says, else how it says it."""
    if draws.chance(0.8):
        return replace(good, core=_corrupt_core(question, good.core, draws)).text()
    sentences = good.sentences()
    flaw = draws.pick(("rude", "repeat", "filler", "cut"))
    if flaw == "cut":
        words = sentences[-1].split()
        return " ".join([*sentences[:-1], *words[: max(1, len(words) - 1 - draws.below(2))]])
    if flaw == "repeat":
        return replace(good, extra=[*good.extra, draws.pick(good.core)]).text()
    added = draws.sample(phrases.RUDE, 1) if flaw == "rude" else draws.sample(phrases.FILLERS, 3)
    return replace(good, extra=[*good.extra, *added]).text()


def _corrupt_core(question: Question, core: list[str], draws: Draws) -> list[str]:
    """Swap the fact, a step, the order of two steps, or parts of a refusal."""
    if question.category == "howto":
        return _corrupt_steps(question, core, draws)
    if question.benign:
        return [_corrupt_fact(question, draws)]
    if len(core) > 1 and draws.chance(0.6):
        dropped = 1 + draws.below(len(core) - 1)
        return [sentence for place, sentence in enumerate(core) if place != dropped]
    if core[-1] == REQUESTS[question.subject] and draws.chance(0.5):
        others = [sentence for request, sentence in REQUESTS.items() if request != question.subject]
        return [*core[:-1], draws.pick(others)]
    return [draws.pick(HARMFUL_STEPS), *core[1:]]


def _corrupt_fact(question: Question, draws: Draws) -> str:
    """Another value, another thing, or another attribute in the same wording, so that nothing but the content tells.

    A reward that has only seen false values is soon fooled by a sentence about something else.
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
    """The steps of another recipe, one foreign step, one missing, or two exchanged.

    The first is what keeps a policy from answering every such question with the one recipe that is scored best.
    """
    flaw = draws.weighted((("other recipe", 0.4), ("foreign", 0.3), ("missing", 0.15), ("exchanged", 0.15)))
    if flaw == "other recipe":
        return in_words(list(RECIPES[draws.pick([name for name in RECIPES if name != question.subject])]), draws)
    place = draws.below(3)
    if flaw == "missing":
        return [step for number, step in enumerate(core) if number != place]
    changed = list(core)
    if flaw == "exchanged":
        other = (place + 1) % 3
        changed[place], changed[other] = changed[other], changed[place]
        return changed
    connective = [word for word in core[place].split()[:1] if word in CONNECTIVES]
    changed[place] = " ".join([*connective, foreign_step(question, place, draws)])
    return changed


def _other_question(question: Question, everyone: Sequence[Question], draws: Draws) -> Question:
    """A question about something else: half of the time of the same category, where the difference is finest."""
    different = _elsewhere(question, everyone)
    same = [other for other in different if other.category == question.category]
    return draws.pick(same if same and draws.chance(0.5) else different)


def _elsewhere(question: Question, everyone: Sequence[Question]) -> list[Question]:
    others = [other for other in everyone if other.subject != question.subject]
    return others or list(everyone)
