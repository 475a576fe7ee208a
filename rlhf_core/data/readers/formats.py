"""What a format of rows is: how a record is recognised, and what it holds.

The reader of a plugin is such a format, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rlhf_core.config.data import ReadOptions
from rlhf_core.config.formats import PAIRS as PAIRS
from rlhf_core.config.formats import PROMPTS as PROMPTS
from rlhf_core.config.formats import REPLIES as REPLIES
from rlhf_core.config.formats import TEXTS as TEXTS
from rlhf_core.data.readers.turns import Refusal, Turn, is_missing, text_of
from rlhf_core.data.row_counts import Record

# Columns that every format reads, for one kind of rows or another.
LABELS = frozenset({"system", "source", "category", "margin", "preference_margin"})
# TRL's name and LLaMA-Factory's of KTO's label.
REPLY_LABELS = ("label", "kto_tag")
REPLY_NAMES = ("reply", "completion", "response", "output")
NUMBER_EXCERPT = 40


class Undecided(Exception):
    """A record prefers no reply, for the reason in the message: it is counted, but not refused."""


class LabelledFalse(Undecided):
    """The only reply of a record is labelled as a bad one, so that only its prompt can be used."""


@dataclass(frozen=True)
class Parsed:
    """A prompt with its replies, or a text; parts that the record lacks are None.

    ``margin`` and ``category`` are set where a format derives them itself. Columns of these names
    are read for every format.
    """

    prompt: list[Turn] | None = None
    chosen: str | None = None
    rejected: str | None = None
    reply: str | None = None
    text: str | None = None
    margin: float | None = None
    category: str | None = None


Parse = Callable[[Any, str, ReadOptions], Parsed | Sequence[Parsed]]


@dataclass(frozen=True)
class Format:
    """A known format.

    Attributes:
        kinds: The kinds of rows that it can serve as, best first.
        matches: Whether a record is of this format; looks at keys and types only.
        parse: Returns what a record holds as rows of a kind, one or several. Raises
            :class:`Refusal` for a record that cannot be used, and :class:`Undecided` for one that
            prefers no reply.
        columns: The columns that are read, besides ``LABELS``, scores and what ``matches`` needs.
        dimensions: The preferences that a record states side by side, of which a source names one.
        note: What to do where the format does not serve as the kind that is asked for.
        join: Makes one record of format ``oasst-trees`` of all rows that belong together.
        example: What messages show of it.
    """

    name: str
    kinds: tuple[str, ...]
    matches: Callable[[Any], bool]
    parse: Parse
    columns: str = ""
    dimensions: tuple[str, ...] = ()
    note: str = ""
    join: Callable[[Sequence[Record]], list[Record]] | None = None
    example: str = "what the reader of a plugin takes"

    @property
    def is_single(self) -> bool:
        """Whether a record has one reply, which may be labelled as good or bad."""
        return self.kinds == REPLIES

    @cached_property
    def read(self) -> frozenset[str]:
        """All columns that are read, except the scores of two replies."""
        columns = LABELS.union(self.columns.split())
        if isinstance(self.matches, Needs):
            columns = columns.union(self.matches.types)
        return columns.union(REPLY_LABELS) if self.is_single else columns


class Needs:
    """Recognises objects that have certain keys, and values of certain types under others."""

    def __init__(self, *present: str, **types: type | tuple[type, ...]) -> None:
        self.types = dict.fromkeys(present, object) | types

    def __call__(self, record: Any) -> bool:
        if not isinstance(record, dict):
            return False
        return all(
            name in record and isinstance(record[name], kind) for name, kind in self.types.items()
        )


def are_all(value: Any, kind: type) -> bool:
    """Return whether a value is a list of one or more items, all of this type."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(item, kind) for item in value)


# What a column has to hold, by the words that ``Shape`` uses for it.
HOLDS: dict[str, Callable[[Any], bool]] = {
    "anything": lambda value: True,
    "a value": lambda value: not is_missing(value),
    "text": lambda value: isinstance(value, str),
    "a list": lambda value: isinstance(value, list),
    "an object": lambda value: isinstance(value, dict),
    "text or turns": lambda value: isinstance(value, str | list),
    "text or a turn": lambda value: isinstance(value, str | dict),
    "text, a turn or turns": lambda value: isinstance(value, str | dict | list),
    "texts": lambda value: are_all(value, str),
    "objects": lambda value: are_all(value, dict),
}


def first_column(record: Any, names: str, held: str) -> str | None:
    """Return the first of some columns that holds what it has to; None if there is none."""
    for name in names.split():
        if name in record and HOLDS[held](record[name]):
            return name
    return None


def number_of(value: Any, name: str) -> float:
    """Return a finite number, also from its text as in csv; otherwise raise :class:`Refusal`."""
    number = math.nan
    if not is_python_number(value):
        with suppress(TypeError, ValueError, OverflowError):
            number = float(value)
    if not math.isfinite(number):
        raise Refusal(f"{name} is not a number: {excerpt(value)}")
    return number


def is_python_number(value: Any) -> bool:
    """Return whether Python takes a value for a number although nobody else does: True, "1_000"."""
    return isinstance(value, bool) or (isinstance(value, str) and "_" in value)


def excerpt(value: Any) -> str:
    """Return the beginning of a value as Python writes it."""
    try:
        return repr(value)[:NUMBER_EXCERPT]
    except ValueError:  # an integer of thousands of digits
        return f"a long {type(value).__name__}"


def system_turns(record: Any, name: str = "system") -> list[Turn]:
    """Return the text under ``name`` as a system turn; no turn if it is missing or empty."""
    system = record.get(name)
    if system:
        return [{"role": "system", "content": text_of(system, name)}]
    return []
