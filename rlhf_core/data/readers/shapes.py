"""One interpreter of the shapes that ``rlhf_core/config/formats.py`` declares: what a record of
each holds.
"""

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
    Parse,
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
# HelpSteer2 writes a dialogue of several turns as one text; its first turn is the user's and has no
# marker.
HELPSTEER_TURN = re.compile(r"\n?<extra_id_1>(User|Assistant)\n")
# White space, and Chinese characters and punctuation, of which each is a word of its own.
WORD_BORDER = re.compile(r"[\s\u3000-\u303f\u3400-\u9fff\uff00-\uffef]")


# Further conditions on the values of a record.


def is_hh(record: Any) -> bool:
    """Return whether two texts are transcripts. Where one is damaged, the other decides.

    Beside a prompt that is no transcript both have to be: a reply may hold a dialogue that its
    prompt asks for.
    """
    chosen, rejected, prompt = record["chosen"], record["rejected"], record.get("prompt")
    if not isinstance(chosen, str) or not isinstance(rejected, str):
        return False
    if "conversations" in record or "instruction" in record:
        return False
    transcripts = [transcript_in(text) is not None for text in (chosen, rejected)]
    if isinstance(prompt, str) and prompt and transcript_in(prompt) is None:
        return all(transcripts)
    return any(transcripts)


def _are_dialogues(record: Any) -> bool:
    """Return whether both replies are turns that begin with the prompt, which a ``prompt`` string
    may repeat.
    """
    prompt = record.get("prompt")
    return prompt is None or (not isinstance(prompt, list) and len(record["chosen"]) > 1)


def _has_turns(record: Any) -> bool:
    values = record["prompt"], record["chosen"], record["rejected"]
    is_list, *are_lists = (isinstance(value, list) for value in values)
    return is_list or all(are_lists)


def _has_two_replies(record: Any) -> bool:
    """Return whether a prompt has two replies, of which one may be missing or no text: then the row
    is refused.
    """
    replies = record["chosen"], record["rejected"]
    if is_hh(record):
        return False
    if isinstance(record["prompt"], list) and all(
        isinstance(reply, str | list) for reply in replies
    ):
        return False  # turns, which are conversational
    return not all(map(is_missing, replies))


def _has_two_texts_alone(record: Any) -> bool:
    """Return whether no other column could be the prompt of two texts; a null is no prompt."""
    others = (value for name, value in record.items() if name not in NO_PROMPTS)
    return not is_hh(record) and not any(isinstance(value, str | list | dict) for value in others)


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
    """Return what recognises records of a shape."""
    if shape.looks == "a list of texts":
        return HOLDS["texts"]
    needs = [(names.split(), HOLDS[held]) for names, held in shape.needs.items()]
    lacks, looks = set(shape.lacks.split()), LOOKS[shape.looks]

    def matches(record: Any) -> bool:
        if not isinstance(record, dict):
            return False
        for names, holds in needs:
            if not any(name in record and holds(record[name]) for name in names):
                return False
        return lacks.isdisjoint(record) and looks(record)

    return matches


# Prompts that are more than one text or a list of turns.


def _helpsteer_prompt(record: Any) -> list[Turn]:
    first, *others = HELPSTEER_TURN.split(text_of(record["prompt"], "the prompt"))
    if not others:
        return prompt_of(first)
    turns = [{"role": "user", "content": first}]
    for speaker, text in zip(others[::2], others[1::2], strict=True):
        turns.append({"role": speaker.lower(), "content": text})
    return turns


def _alpaca_prompt(record: Any) -> list[Turn]:
    """Return instruction and input as one user turn, after the turns of ``history`` (pairs of
    question and answer).

    Without a history they may be an HH-RLHF transcript.
    """
    history = record.get("history") or []
    if not isinstance(history, list | tuple) or not all(
        isinstance(p, list | tuple) and len(p) == 2 for p in history
    ):
        raise Refusal("history is not a list of [question, answer]")
    turns = []
    for question, answer in history:
        turns.append({"role": "user", "content": text_of(question, "history")})
        turns.append({"role": "assistant", "content": text_of(answer, "history")})
    parts = [text_of(record.get(name) or "", name) for name in ("instruction", "input")]
    text = "\n\n".join(part for part in parts if part.strip())
    return (
        [*turns, {"role": "user", "content": text}] if turns else prompt_of(text, "the instruction")
    )


STYLES: dict[str, Callable[[Any], list[Turn]]] = {
    "helpsteer": _helpsteer_prompt,
    "alpaca": _alpaca_prompt,
}


# What makes rows of a record.


def _columns(shape: Shape, record: Any, kind: str, options: ReadOptions) -> Parsed:
    """Read a prompt in one column and no, one or two replies in others."""
    replies = [_reply_column(record, names) for names in shape.replies]
    if shape.style:
        turns = STYLES[shape.style](record)
    else:
        turns = prompt_of(record[first_column(record, shape.prompt, shape.prompt_is)])
    if shape.system:
        turns = [*system_turns(record, shape.system), *turns]
    if not replies or (kind == "prompts" and shape.dimensions):
        return Parsed(turns)
    best, margin = _preference(shape, record, turns, options)
    texts = [reply_after(turns, record[name], name) for name in replies]
    if len(texts) == 1:
        return Parsed(turns, reply=texts[0])
    category: str | None = options.dimension
    given = record.get(shape.category) if shape.category else None
    if isinstance(given, str) and given:
        category = text_of(given, shape.category)
    return Parsed(turns, texts[best], texts[1 - best], margin=margin, category=category)


def _reply_column(record: Any, names: str) -> str:
    """Return the column of a reply, of which there must not be several with different ones."""
    given = [name for name in names.split() if isinstance(record.get(name), str | list)]
    if any(record[name] != record[given[0]] for name in given):
        raise Refusal(
            f"there are several replies: {', '.join(given)}; name one as reply in columns"
        )
    return first_column(record, names, "a value") or names


def _preference(
    shape: Shape, record: Any, turns: list[Turn], options: ReadOptions
) -> tuple[int, float | None]:
    """Return the number of the better reply, and the margin where the label says how much better it
    is.

    Where a record states several preferences, ``options.dimension`` names one: ``agreed`` takes the
    pairs that all of them order alike.
    """
    if shape.prefers == "strength":
        (column,) = shape.labels
        strength = number_of(record[column], column)
        if not abs(strength) <= STRONGEST_PREFERENCE:
            raise Refusal(
                f"{column} is {record[column]!r}, not from -{STRONGEST_PREFERENCE} to {STRONGEST_PREFERENCE}"
            )
        if strength == 0:
            raise Undecided("neither reply is preferred", turns)
        return int(strength > 0), abs(strength)
    if shape.prefers == "first":
        return 0, None
    numbers = [number_of(record[column], column) for column in shape.labels]
    for column, number in zip(shape.labels, numbers, strict=True):
        if number not in (0, 1):
            raise Refusal(f"{column} is {record[column]!r}, not 0 or 1")
    helpful, safe = int(numbers[0]), int(numbers[-1])
    if options.dimension == "agreed" and helpful != safe:
        raise Undecided("the more helpful reply is not the safer one")
    return (safe if options.dimension == "safe" else helpful), None


def _implicit(
    split: Callable[[Any, str], tuple[Any, str]], turns: Callable[[Any], list[Turn]], record: Any
) -> Parsed:
    """Read two dialogues of which each is the prompt and a reply.

    Args:
        split: Returns all before the reply, and the reply.
        turns: Returns the turns of the former.
    """
    before, chosen = split(record["chosen"], "chosen")
    other, rejected = split(record["rejected"], "rejected")
    if before != other:
        raise Refusal("the prompts of the two replies differ")
    prompt = turns(before)
    if record.get("prompt"):
        _require_same_prompt(
            record["prompt"], [turn for turn in prompt if turn["role"] != "system"]
        )
    return Parsed(prompt, chosen, rejected)


def _require_same_prompt(given: Any, prompt: list[Turn]) -> None:
    """Refuse a record whose prompt is neither that of its dialogues nor the first or last turns of
    it.
    """
    full = [turn["content"].strip() for turn in prompt]
    if isinstance(given, str) and [given.strip()] in (full[:1], full[-1:]):
        return
    texts = [turn["content"].strip() for turn in prompt_of(given)]
    if texts not in (full[: len(texts)], full[-len(texts) :]):
        raise Refusal("the prompt is not that of the transcripts")


def _split_turn_list(turns: list[str], name: str) -> tuple[list[str], str]:
    """Split a dialogue of MOSS-RLHF's reward data, whose last turn is the reply."""
    return turns[:-1], reply_of({"role": "assistant", "content": turns[-1]}, name)


def _turns_backwards(before: list[str]) -> list[Turn]:
    """Return turns whose roles alternate backwards from the reply: a history without its beginning
    keeps its roles.
    """
    if not before:
        raise Refusal("the dialogue has a reply but no prompt")
    return _alternating(before, ("user", "assistant") if len(before) % 2 else ("assistant", "user"))


def _alternating(
    texts: Sequence[str], roles: tuple[str, str] = ("user", "assistant")
) -> list[Turn]:
    return [
        {"role": roles[number % 2], "content": text_of(text, "a turn")}
        for number, text in enumerate(texts)
    ]


def _one_beginning(record: Any) -> Parsed:
    """Read TRL's implicit prompts of strings: the prompt is the longest beginning that both texts
    share.

    TRL may cut inside a word; here the prompt ends before the first word that differs, and before
    one space there.
    """
    chosen, rejected = (text_of(record[name], name) for name in ("chosen", "rejected"))
    require_no_dialogue(chosen, "chosen", answered=True)
    if chosen == rejected:
        raise Refusal("both texts are the same")
    shorter = min(len(chosen), len(rejected))
    end = next(
        (n for n, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), shorter
    )
    if not all(not rest or WORD_BORDER.match(rest) for rest in (chosen[end:], rejected[end:])):
        while end and not WORD_BORDER.match(chosen[end - 1]):
            end -= 1
    prompt = chosen[:end].removesuffix(" ")  # as in "The sky is" and " blue."
    if not prompt.strip():
        raise Refusal("there is no prompt: the two texts do not begin with the same words")
    require_no_dialogue(prompt, "what both texts begin with")
    return Parsed(
        [{"role": "user", "content": prompt}], chosen[len(prompt) :], rejected[len(prompt) :]
    )


def _dialogue(turns: list[Turn]) -> Parsed:
    """Return a dialogue that ends with the user as a prompt, any other as a demonstration."""
    if turns[-1]["role"] == "user":
        return Parsed(turns)
    prompt, reply = split_reply(turns)
    return Parsed(prompt, reply=reply)


READS: dict[str, Callable[[Shape, Any, str, ReadOptions], Parsed | Sequence[Parsed]]] = {
    **RANKINGS,
    "columns": _columns,
    "transcripts": lambda shape, record, *_: _implicit(split_transcript, transcript_turns, record),
    "dialogues": lambda shape, record, *_: _implicit(
        lambda value, name: split_reply(turns_of(value)), list, record
    ),
    "pair of turn lists": lambda shape, record, *_: _implicit(
        _split_turn_list, _turns_backwards, record
    ),
    "texts with one beginning": lambda shape, record, *_: _one_beginning(record),
    "dialogue": lambda shape, record, *_: _dialogue(
        turns_of(record[first_column(record, shape.prompt, "a list")])
    ),
    "turn list": lambda shape, record, *_: _dialogue(_alternating(record)),
    "text": lambda shape, record, *_: Parsed(text=text_of(record["text"], "text")),
}


def _format(shape: Shape) -> Format:
    parse: Parse = partial(READS[shape.reads], shape)
    join = joined_messages if shape.name == "oasst-messages" else None
    return Format(
        shape.name,
        shape.kinds,
        _matcher(shape),
        parse,
        shape.columns,
        shape.dimensions,
        shape.note,
        join,
        shape.example,
    )


# The first that matches a record is its format.
FORMATS = tuple(map(_format, SHAPES))
