"""Every question of the world, contents crossed with forms, and its texts parsed into questions and
meanings.

A (content, form) pair is a *group*, the unit of splitting: all polite prefixes of a question share
its group, and a held-out group asks in another form for something that training asks for too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from functools import cache

from rlhf_core.world import content as phrases
from rlhf_core.world.content import (
    ATTRIBUTES,
    CONNECTIVES,
    HARMFUL_STEPS,
    PREFIXES,
    RECIPES,
    REQUESTS,
    VALUES,
    statements,
    stories,
    subjects,
    things,
)

FACT_FORMS: tuple[str, ...] = (
    "what is the {attribute} of the {thing}?",
    "tell me the {attribute} of the {thing}.",
    "do you know the {attribute} of the {thing}?",
    "i want to know the {attribute} of the {thing}.",
    "which {attribute} does the {thing} have?",
    "name the {attribute} of the {thing}.",
    "what can you say about the {attribute} of the {thing}?",
)
# One more form per attribute, the way people ask most often.
SPECIAL_FORMS: dict[str, str] = {
    "color": "what color is the {thing}?",
    "size": "how big is the {thing}?",
    "place": "where is the {thing}?",
}
TASK_FORMS: tuple[str, ...] = (
    "how do i {task}?",
    "how can i {task}?",
    "tell me how to {task}.",
    "show me how to {task}.",
    "i want to {task}. how?",
    "what are the steps to {task}?",
    "can you help me to {task}?",
    "what is the best way to {task}?",
)

SOURCE = "world"  # what rows of the world name as their source
_FORM = "|form "


def content_of_group(group: str) -> str:
    """Return what a group asks for, whatever the form: replies to two forms of a question succeed
    or fail together.
    """
    return group.rpartition(_FORM)[0] or group


@dataclass(frozen=True)
class Question:
    """A question without polite prefix. ``subject`` is the thing, recipe or request it is about."""

    category: str
    content: str
    form: int
    text: str
    subject: str
    attribute: str = ""
    answer: str = ""

    @property
    def group(self) -> str:
        """Key by which prompts are split: content and form, never the prefix."""
        return f"{self.category}|{self.content}{_FORM}{self.form}"

    @property
    def benign(self) -> bool:
        """Whether it deserves an answer rather than a refusal."""
        return self.category != "harmful"

    def with_prefix(self, prefix: str) -> str:
        """Return the text of the prompt as a user writes it."""
        return f"{prefix} {self.text}".strip()


def asked(attribute: str, thing: str) -> tuple[str, ...]:
    """Return all forms of the question for an attribute of a thing."""
    return tuple(
        form.format(attribute=attribute, thing=thing)
        for form in (*FACT_FORMS, SPECIAL_FORMS[attribute])
    )


@cache
def all_questions() -> tuple[Question, ...]:
    """Return all questions in a fixed order: facts, facts in the prompt, how-to, harmful."""
    forms = range(len(FACT_FORMS) + 1)
    facts = [
        Question("fact", f"{name} {key}", form, asked(key, name)[form], name, key, values[key])
        for name, values in things().items()
        for key in ATTRIBUTES
        for form in forms
    ]
    context = []
    for number, one in enumerate(stories()):
        # Half of the forms each: stories are many, and shall not crowd out the other questions.
        for form in forms[number % 2 :: 2]:
            text = f"{one.sentence()} {asked(one.attribute, one.name)[form]}"
            content = f"{one.owner} {one.name} {one.value}"
            context.append(
                Question("context", content, form, text, one.name, one.attribute, one.value)
            )
    tasks = [
        Question(category, task, form, pattern.format(task=task), task)
        for category, names in (("howto", RECIPES), ("harmful", REQUESTS))
        for task in names
        for form, pattern in enumerate(TASK_FORMS)
    ]
    return (*facts, *context, *tasks)


@cache
def prompt_table() -> dict[str, Question]:
    """Return the questions by prompt text, for every question with every prefix."""
    return {
        question.with_prefix(prefix): question
        for question in all_questions()
        for prefix in PREFIXES
    }


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
    """The meaning of a sentence; two sentences of the same meaning repeat each other, whatever
    their wording.

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
    """The finished sentences in order, whether an unfinished one follows, and the total number of
    words.
    """

    sentences: tuple[Meaning, ...]
    unfinished: bool
    words: int


def normalise(text: str) -> str:
    """Return lower case with single spaces, no commas between words and no space before the full
    stop.
    """
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
        (Kind.HARM, HARMFUL_STEPS), (Kind.REFUSAL, phrases.REFUSALS), (Kind.REASON, phrases.REASONS),
        (Kind.OPENER, phrases.OPENERS), (Kind.CLOSER, phrases.CLOSERS), (Kind.EVASION, phrases.EVASIONS),
        (Kind.FILLER, phrases.FILLERS), (Kind.RUDE, phrases.RUDE),
    ):  # fmt: skip
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
