"""What a format is: how a record of it is recognised, and which prompts and replies the record holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_core.config.data import ReadOptions
from rlhf_core.data.readers.content import Record
from rlhf_core.data.readers.turns import Refusal, Turn, text_of

PAIRS = frozenset({"preferences", "demonstrations", "prompts", "pretrain"})
REPLIES = frozenset({"demonstrations", "prompts", "pretrain"})
PROMPTS = frozenset({"prompts"})
TEXTS = frozenset({"pretrain"})
NUMBER_EXCERPT = 40
SHOWN_KEYS = 20
KEY_LENGTH = 60


class Undecided(Exception):
    """A record prefers no reply, for the reason in the message: it is dropped and counted, without being at fault.

    ``prompt`` is its prompt, which can be used nevertheless.
    """

    def __init__(self, reason: str, prompt: list[Turn] | None = None) -> None:
        super().__init__(reason)
        self.prompt = prompt


class LabelledFalse(Undecided):
    """The only reply of a record is labelled as a bad one: nothing is learned from it, its prompt can be used."""


@dataclass(frozen=True)
class Parsed:
    """A prompt with its replies, or a text; parts that the record lacks are None.

    ``margin`` and ``category`` are those that a format derives itself; columns of these names need not be repeated.
    """

    prompt: list[Turn] | None = None
    chosen: str | None = None
    rejected: str | None = None
    reply: str | None = None
    text: str | None = None
    margin: float | None = None
    category: str | None = None


@dataclass(frozen=True)
class Format:
    """A known format.

    Attributes:
        name: As params.yaml spells it.
        example: What messages show of it.
        carries: The kinds of rows that it can serve as.
        matches: Whether a record is of this format; looks at keys and types only.
        parse: Returns what a record holds as rows of a kind, one or several. Raises :class:`Refusal` for a record that
            cannot be used, and :class:`Undecided` for one that prefers no reply.
        dimensions: The preferences that a record states side by side, of which a source names one.
        note: What to do where the format does not serve as the kind that is asked for.
        join: Makes one record of all that belong together, where a row is only a part (a message of a tree).
        joined_as: The name of the format that joined records have.
    """

    name: str
    example: str
    carries: frozenset[str]
    matches: Callable[[Any], bool]
    parse: Callable[[Any, str, ReadOptions], Sequence[Parsed]]
    dimensions: tuple[str, ...] = ()
    note: str = ""
    join: Callable[[Sequence[Record]], list[Record]] | None = None
    joined_as: str = ""


def single(parse: Callable[[Any], Parsed]) -> Callable[[Any, str, ReadOptions], Sequence[Parsed]]:
    """Return the ``parse`` of a format whose records are one row each, whatever the kind."""
    return lambda record, kind, options: [parse(record)]


def has(record: Any, **types: type | tuple[type, ...]) -> bool:
    """Whether a record is an object with values of these types under these keys."""
    return isinstance(record, dict) and all(isinstance(record.get(name), kind) for name, kind in types.items())


def system_turns(record: Any, name: str = "system") -> list[Turn]:
    """Return the text under ``name`` as a system turn; no turn where it is missing or empty."""
    system = record.get(name)
    return [{"role": "system", "content": text_of(system, name)}] if system else []


def number_of(value: Any, name: str) -> float:
    """Return a finite number, also from its text as in csv; otherwise raise :class:`Refusal`."""
    try:
        python_only = isinstance(value, bool) or (isinstance(value, str) and "_" in value)  # "1_000"
        number = math.nan if python_only else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise Refusal(f"{name} is not a number: {excerpt(value)}")
    return number


def excerpt(value: Any) -> str:
    """Return the beginning of a value as Python writes it."""
    try:
        return repr(value)[:NUMBER_EXCERPT]
    except ValueError:  # an integer of thousands of digits
        return f"a long {type(value).__name__}"


def printable(text: str) -> str:
    """Return ``text`` as every terminal can print it: half of a surrogate pair as its escape."""
    return text.encode("utf-8", "backslashreplace").decode()


def record_shape(value: Any) -> str:
    """Return the keys of a record, with the types of values other than text, or the type of another value."""
    if not isinstance(value, dict):
        return type(value).__name__
    names = [
        str(name)[:KEY_LENGTH] + ("" if isinstance(item, str) else f" ({type(item).__name__})")
        for name, item in value.items()
    ]
    return f"keys {listed(names)}"


def listed(names: Sequence[str]) -> str:
    """Return the first twenty names, and how many there are beside them."""
    more = f" and {len(names) - SHOWN_KEYS} more" if len(names) > SHOWN_KEYS else ""
    return printable(", ".join(names[:SHOWN_KEYS])) + more if names else "none"
