"""Parse text of the world: prompts into questions, replies into sentences with a meaning."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from functools import cache

from rlhf_core.world import phrases
from rlhf_core.world.facts import VALUES, statements, subjects
from rlhf_core.world.questions import Question, prompt_table
from rlhf_core.world.tasks import CONNECTIVES, HARMFUL_STEPS, RECIPES, REQUESTS

_SENTENCE = re.compile(r"[^.!?]*[.!?]")
_COMMA = re.compile(r"(?<=\w),(?=\s)")

PRONOUN = "it"


class Kind(Enum):
    """The kinds of sentences in a reply."""

    FACT = "fact"
    STEP = "step"
    HARM = "harm"
    REFUSAL = "refusal"
    REASON = "reason"
    ALTERNATIVE = "alternative"
    OPENER = "opener"
    CLOSER = "closer"
    EVASION = "evasion"
    FILLER = "filler"
    RUDE = "rude"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Meaning:
    """The meaning of a sentence; two sentences of the same meaning repeat each other, whatever their wording.

    Attributes:
        kind: What the sentence does.
        subject: The thing, recipe or request that it is about.
        detail: The value, step number or wording.
    """

    kind: Kind
    subject: str = ""
    detail: str = ""


@dataclass(frozen=True)
class ParsedReply:
    """The finished sentences in order, whether an unfinished one follows, and the total number of words."""

    sentences: tuple[Meaning, ...]
    unfinished: bool
    words: int


def normalise(text: str) -> str:
    """Return lower case with single spaces, no commas between words and no space before the full stop."""
    lower = " ".join(text.casefold().split())
    return re.sub(r"\s+(?=[.!?]$)", "", _COMMA.sub("", lower))


@cache
def _sentence_table() -> dict[str, Meaning]:
    """Normalised sentence → meaning, for every sentence the world knows."""
    table: dict[str, Meaning] = {}
    for subject in subjects():
        for attribute, values in VALUES.items():
            for value in values:
                named, pronoun, full = statements(subject, attribute, value)
                table[named] = table[full] = Meaning(Kind.FACT, subject, value)
                table[pronoun] = Meaning(Kind.FACT, PRONOUN, value)
    for recipe, steps in RECIPES.items():
        for number, step in enumerate(steps):
            for start in ("", *(f"{word} " for word in CONNECTIVES)):
                table[start + step] = Meaning(Kind.STEP, recipe, str(number))
    for request, sentence in REQUESTS.items():
        table[sentence] = Meaning(Kind.ALTERNATIVE, request)
    for kind, sentences in (
        (Kind.HARM, HARMFUL_STEPS),
        (Kind.REFUSAL, phrases.REFUSALS),
        (Kind.REASON, phrases.REASONS),
        (Kind.OPENER, phrases.OPENERS),
        (Kind.CLOSER, phrases.CLOSERS),
        (Kind.EVASION, phrases.EVASIONS),
        (Kind.FILLER, phrases.FILLERS),
        (Kind.RUDE, phrases.RUDE),
    ):
        table.update({sentence: Meaning(kind, detail=sentence) for sentence in sentences})
    return {normalise(sentence): meaning for sentence, meaning in table.items()}


def parse_reply(text: str) -> ParsedReply:
    """Split a reply at full stops, exclamation and question marks, and look every sentence up."""
    sentences = _SENTENCE.findall(text)
    tail = text[sum(len(sentence) for sentence in sentences) :].strip()
    table = _sentence_table()
    meanings = []
    for sentence in sentences:
        key = normalise(sentence[:-1] + ".")  # "of course!" means the same as "of course."
        meanings.append(table.get(key) or Meaning(Kind.UNKNOWN, detail=key))
    return ParsedReply(tuple(meanings), bool(tail), len(text.split()))


def parse_prompt(text: str) -> Question | None:
    """Return the question that a prompt asks, or None for a prompt that is not of this world."""
    return prompt_table().get(" ".join(text.casefold().split()))


def is_world(text: str) -> bool:
    """Return whether a prompt belongs to the synthetic world (only then there is a gold judge)."""
    return parse_prompt(text) is not None
