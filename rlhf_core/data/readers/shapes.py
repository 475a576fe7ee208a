"""The interpreter of the shapes that ``rlhf_core/config/formats.py`` declares."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rlhf_core.config.data import ReadOptions
from rlhf_core.config.formats import SHAPES, Shape
from rlhf_core.data.readers.formats import (
    HOLDS,
    Format,
    Parsed,
    Undecided,
    first_column,
    number_of,
    system_turns,
)
from rlhf_core.data.readers.rankings import RANKINGS, joined_messages
from rlhf_core.data.readers.turns import (
    Refusal,
    Turn,
    is_missing,
    prompt_of,
    reply_after,
    reply_of,
    require_no_dialogue,
    split_reply,
    split_transcript,
    text_of,
    transcript_in,
    transcript_turns,
    turns_of,
)

# Columns beside a pair that are not its prompt.
NO_PROMPTS = frozenset({"chosen", "rejected", "system", "source", "category", "id", "prompt_id"})
STRONGEST_PREFERENCE = 3
# HelpSteer2 writes a dialogue of several turns as one text. Its first turn is the user's, and has
# no marker.
HELPSTEER_TURN = re.compile(r"\n?<extra_id_1>(User|Assistant)\n")
# White space, and Chinese characters and punctuation, each of which is a word of its own.
WORD_BORDER = re.compile(r"[\s\u3000-\u303f\u3400-\u9fff\uff00-\uffef]")


# Conditions on the values of a record, by their names in ``Shape.looks``.


def is_hh(record: Any) -> bool:
    """Return whether two texts are transcripts. If one is damaged, the other decides.

    Beside a prompt that is no transcript, both have to be transcripts: a reply may hold a dialogue
    that its prompt asks for.
    """
    chosen = record["chosen"]
    rejected = record["rejected"]
    prompt = record.get("prompt")
    if not isinstance(chosen, str) or not isinstance(rejected, str):
        return False
    if "conversations" in record or "instruction" in record:
        return False
    transcripts = [transcript_in(text) is not None for text in (chosen, rejected)]
    if isinstance(prompt, str) and prompt and transcript_in(prompt) is None:
        return all(transcripts)
    return any(transcripts)


def _are_dialogues(record: Any) -> bool:
    """Return whether both replies are dialogues, whose prompt may be repeated as a text."""
    prompt = record.get("prompt")
    if prompt is None:
        return True
    return not isinstance(prompt, list) and len(record["chosen"]) > 1


def _has_turns(record: Any) -> bool:
    """Return whether the prompt, or both replies, are lists of turns."""
    if isinstance(record["prompt"], list):
        return True
    return isinstance(record["chosen"], list) and isinstance(record["rejected"], list)


def _has_two_replies(record: Any) -> bool:
    """Return whether a prompt has two replies, one of which may be missing or no text.

    The row is refused for such a reply, and the rest of the file is read.
    """
    if is_hh(record):
        return False
    replies = record["chosen"], record["rejected"]
    are_readable = all(isinstance(reply, str | list) for reply in replies)
    if isinstance(record["prompt"], list) and are_readable:
        return False  # these are turns, which are of the format conversational
    return not all(map(is_missing, replies))


def _has_two_texts_alone(record: Any) -> bool:
    """Return whether no other column could be the prompt of two texts; a null is no prompt."""
    if is_hh(record):
        return False
    others = (value for name, value in record.items() if name not in NO_PROMPTS)
    return not any(isinstance(value, str | list | dict) for value in others)


LOOKS: dict[str, Callable[[Any], bool]] = {
    "": lambda record: True,
    "transcripts": is_hh,
    "no transcripts": lambda record: not is_hh(record),
    "no prompt": lambda record: not record.get("prompt"),
    "whole dialogues": _are_dialogues,
    "turns": _has_turns,
    "two replies": _has_two_replies,
    "two texts alone": _has_two_texts_alone,
}


def _matcher(shape: Shape) -> Callable[[Any], bool]:
    """Return the function that recognises the records of a shape."""
    if shape.looks == "a list of texts":
        return HOLDS["texts"]
    needs = [(names.split(), HOLDS[held]) for names, held in shape.needs.items()]
    lacks = set(shape.lacks.split())
    looks = LOOKS[shape.looks]

    def matches(record: Any) -> bool:
        if not isinstance(record, dict):
            return False
        for names, holds in needs:
            if not any(name in record and holds(record[name]) for name in names):
                return False
        return lacks.isdisjoint(record) and looks(record)

    return matches


# Prompts that are neither one text nor a list of turns, by their names in ``Shape.style``.


def _helpsteer_prompt(record: Any) -> list[Turn]:
    text = text_of(record["prompt"], "the prompt")
    first, *others = HELPSTEER_TURN.split(text)
    if not others:
        return prompt_of(first)
    turns = [{"role": "user", "content": first}]
    speakers = others[::2]
    texts = others[1::2]
    for speaker, text in zip(speakers, texts, strict=True):
        turns.append({"role": speaker.lower(), "content": text})
    return turns


def _alpaca_prompt(record: Any) -> list[Turn]:
    """Return instruction and input as one user turn, after the turns of ``history``.

    Without a history, they may be an HH-RLHF transcript.
    """
    turns = []
    history = record.get("history") or []
    if not isinstance(history, list | tuple):
        raise Refusal("history is not a list of [question, answer]")
    for exchange in history:
        if not isinstance(exchange, list | tuple) or len(exchange) != 2:
            raise Refusal("history is not a list of [question, answer]")
    for question, answer in history:
        turns.append({"role": "user", "content": text_of(question, "history")})
        turns.append({"role": "assistant", "content": text_of(answer, "history")})
    parts = [text_of(record.get(name) or "", name) for name in ("instruction", "input")]
    text = "\n\n".join(part for part in parts if part.strip())
    if not turns:
        return prompt_of(text, "the instruction")
    return [*turns, {"role": "user", "content": text}]


STYLES: dict[str, Callable[[Any], list[Turn]]] = {
    "helpsteer": _helpsteer_prompt,
    "alpaca": _alpaca_prompt,
}


# What makes rows of a record, by its name in ``Shape.reads``.


def _columns(shape: Shape, record: Any, kind: str, options: ReadOptions) -> Parsed:
    """Read a prompt from one column, and at most two replies from others."""
    replies = [_reply_column(record, names) for names in shape.replies]
    if shape.style:
        turns = STYLES[shape.style](record)
    else:
        name = first_column(record, shape.prompt, shape.prompt_is)
        turns = prompt_of(record[name])
    if shape.system:
        turns = [*system_turns(record, shape.system), *turns]
    if not replies or (kind == "prompts" and shape.dimensions):
        return Parsed(turns)
    try:
        best, margin = _preference(shape, record, options)
    except Undecided:
        if kind != "prompts":
            raise
        return Parsed(turns)
    texts = [reply_after(turns, record[name], name) for name in replies]
    if len(texts) == 1:
        return Parsed(turns, reply=texts[0])
    category: str | None = options.dimension
    given = None
    if shape.category:
        given = record.get(shape.category)
    if isinstance(given, str) and given:
        category = text_of(given, shape.category)
    return Parsed(turns, texts[best], texts[1 - best], margin=margin, category=category)


def _reply_column(record: Any, names: str) -> str:
    """Return the column of a reply; :class:`Refusal` if several columns hold different replies."""
    given = [name for name in names.split() if isinstance(record.get(name), str | list)]
    if any(record[name] != record[given[0]] for name in given):
        raise Refusal(
            f"there are several replies: {', '.join(given)}; name one as reply in columns"
        )
    return first_column(record, names, "a value") or names


def _preference(shape: Shape, record: Any, options: ReadOptions) -> tuple[int, float | None]:
    """Return the number of the better reply, and the margin if the label is a strength.

    If a record states several preferences, ``options.dimension`` names one; ``agreed`` takes the
    pairs that all of them order alike.
    """
    if shape.prefers == "first":
        return 0, None
    numbers = [number_of(record[column], column) for column in shape.labels]
    if shape.prefers == "strength":
        (column,) = shape.labels
        (strength,) = numbers
        if not abs(strength) <= STRONGEST_PREFERENCE:
            raise Refusal(
                f"{column} is {record[column]!r}, not from -{STRONGEST_PREFERENCE} to {STRONGEST_PREFERENCE}"
            )
        if strength == 0:
            raise Undecided("neither reply is preferred")
        return int(strength > 0), abs(strength)
    for column, number in zip(shape.labels, numbers, strict=True):
        if number not in (0, 1):
            raise Refusal(f"{column} is {record[column]!r}, not 0 or 1")
    helpful = int(numbers[0])
    safe = int(numbers[-1])
    if options.dimension == "agreed" and helpful != safe:
        raise Undecided("the more helpful reply is not the safer one")
    if options.dimension == "safe":
        return safe, None
    return helpful, None


def _split_turn_list(texts: list[str], name: str) -> tuple[list[str], str]:
    """Split a dialogue of MOSS-RLHF's reward data, the last turn of which is the reply."""
    return texts[:-1], reply_of({"role": "assistant", "content": texts[-1]}, name)


def _turns_backwards(before: list[str]) -> list[Turn]:
    """Return turns whose roles alternate backwards from the reply.

    A history that lacks its beginning thus keeps its roles.
    """
    if not before:
        raise Refusal("the dialogue has a reply but no prompt")
    first, second = ("user", "assistant") if len(before) % 2 else ("assistant", "user")
    return _alternating(before, first, second)


def _alternating(texts: Sequence[str], *roles: str) -> list[Turn]:
    turns = []
    for number, text in enumerate(texts):
        turns.append({"role": roles[number % 2], "content": text_of(text, "a turn")})
    return turns


# Two dialogues that are each the prompt and a reply: what splits off the reply, and what makes
# turns of the rest.
Split = Callable[[Any, str], tuple[Any, str]]
IMPLICIT: dict[str, tuple[Split, Callable[[Any], list[Turn]]]] = {
    "transcripts": (split_transcript, transcript_turns),
    "dialogues": (lambda turns, name: split_reply(turns_of(turns)), list),
    "pair of turn lists": (_split_turn_list, _turns_backwards),
}


def _implicit(shape: Shape, record: Any, *_: Any) -> Parsed:
    """Read two dialogues that are each the prompt and a reply."""
    split, turns_before = IMPLICIT[shape.reads]
    before, chosen = split(record["chosen"], "chosen")
    other, rejected = split(record["rejected"], "rejected")
    if before != other:
        raise Refusal("the prompts of the two replies differ")
    prompt = turns_before(before)
    if record.get("prompt"):
        asked = [turn for turn in prompt if turn["role"] != "system"]
        _require_same_prompt(record["prompt"], asked)
    return Parsed(prompt, chosen, rejected)


def _require_same_prompt(given: Any, prompt: list[Turn]) -> None:
    """Refuse a record whose prompt is neither that of its dialogues nor one end of it."""
    full = [turn["content"].strip() for turn in prompt]
    if isinstance(given, str) and [given.strip()] in (full[:1], full[-1:]):
        return
    texts = [turn["content"].strip() for turn in prompt_of(given)]
    if texts not in (full[: len(texts)], full[-len(texts) :]):
        raise Refusal("the prompt is not that of the transcripts")


def _one_beginning(shape: Shape, record: Any, *_: Any) -> Parsed:
    """Read TRL's implicit prompts of strings: the longest beginning that both texts share.

    TRL may cut inside a word. Here the prompt ends before the first word that differs, and before
    the space there.
    """
    chosen, rejected = (text_of(record[name], name) for name in shape.replies)
    require_no_dialogue(chosen, "chosen", answered=True)
    if chosen == rejected:
        raise Refusal("both texts are the same")
    end = 0
    for one, other in zip(chosen, rejected, strict=False):
        if one != other:
            break
        end += 1
    rests = filter(None, (chosen[end:], rejected[end:]))
    if not all(map(WORD_BORDER.match, rests)):
        while end and not WORD_BORDER.match(chosen[end - 1]):
            end -= 1
    prompt = chosen[:end].removesuffix(" ")  # as in "The sky is" and " blue."
    if not prompt.strip():
        raise Refusal("there is no prompt: the two texts do not begin with the same words")
    require_no_dialogue(prompt, "what both texts begin with")
    turns = [{"role": "user", "content": prompt}]
    return Parsed(turns, chosen[len(prompt) :], rejected[len(prompt) :])


def _dialogue(shape: Shape, record: Any, *_: Any) -> Parsed:
    """Read a dialogue: a prompt if it ends with the user, a demonstration otherwise."""
    if shape.prompt:
        name = first_column(record, shape.prompt, shape.prompt_is)
        turns = turns_of(record[name])
    else:
        turns = _alternating(record, "user", "assistant")
    if turns[-1]["role"] == "user":
        return Parsed(turns)
    prompt, reply = split_reply(turns)
    return Parsed(prompt, reply=reply)


def _text(shape: Shape, record: Any, *_: Any) -> Parsed:
    return Parsed(text=text_of(record[shape.prompt], shape.prompt))


READS: dict[str, Callable[[Shape, Any, str, ReadOptions], Parsed | Sequence[Parsed]]] = {
    **RANKINGS,
    **dict.fromkeys(IMPLICIT, _implicit),
    "columns": _columns,
    "texts with one beginning": _one_beginning,
    "dialogue": _dialogue,
    "turn list": _dialogue,
    "text": _text,
}


def _format(shape: Shape) -> Format:
    return Format(
        shape.name,
        shape.kinds,
        _matcher(shape),
        partial(READS[shape.reads], shape),
        columns=shape.columns,
        dimensions=shape.dimensions,
        note=shape.note,
        join=joined_messages if shape.name == "oasst-messages" else None,
        example=shape.example,
    )


# The first that matches a record is its format.
FORMATS = tuple(map(_format, SHAPES))
