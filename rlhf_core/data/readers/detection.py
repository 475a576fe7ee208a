"""All known formats, and which one a record or a file is of."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from rlhf_core.data.readers.comparisons import COMPARISONS
from rlhf_core.data.readers.content import Record
from rlhf_core.data.readers.format import Format, record_shape
from rlhf_core.data.readers.general import GENERAL, REPLY_NAMES
from rlhf_core.data.readers.rankings import MESSAGE_TREES, RANKINGS
from rlhf_core.data.readers.turns import is_missing
from rlhf_core.data.tables import bytes_in_memory, chunked
from rlhf_core.errors import DataError

# The first that matches is used, so formats with more fields come first.
FORMATS = (*MESSAGE_TREES, *COMPARISONS, *RANKINGS, *GENERAL)
# The format of a file is that of this share of the records that have one, among the first so many.
PROBE = 1000
PROBE_BYTES = 256 * 2**20
MAJORITY = 0.9
PAIR = ("chosen", "rejected")
# Other names of a pair's columns; the better reply is first.
PAIR_NAMES = (
    *(PAIR, ("pos_resp", "neg_resp"), ("pos", "neg"), ("positive", "negative"), ("preferred", "dispreferred")),
    *(("preferred", "rejected"), ("accepted", "rejected"), ("winner", "loser"), ("win", "lose"), ("better", "worse")),
    *(("good", "bad"), ("best", "worst"), ("chosen_response", "rejected_response"), ("response_w", "response_l")),
    *(("response_chosen", "response_rejected"), ("positive_response", "negative_response"), ("y_w", "y_l")),
    *(("good_response", "bad_response"), ("preferred_response", "dispreferred_response"), ("pos_reply", "neg_reply")),
    *(("positive_reply", "negative_reply"), ("better_response", "worse_response"), ("chosen_reply", "rejected_reply")),
    *(("pos_answer", "neg_answer"), ("good_answer", "bad_answer"), ("correct_answer", "incorrect_answer")),
    *(("chosen_answer", "rejected_answer"), ("preferred_answer", "rejected_answer"), ("answer_w", "answer_l")),
)
# Names such as response_a, model_2_answer, reply1 and completions, but not answer_type or output_format.
REPLY_WORDS = r"chosen|rejected|response|reply|replie|answer|output|completion|candidate|generation|winner|loser"
_REPLY_COLUMN = re.compile(rf"(?:^|[\W_\d])(?:{REPLY_WORDS})s?(?:[\W_]?(?:\d\d?|[abwl]|text))?$", re.IGNORECASE)


def first_records(records: Iterable[Record]) -> list[Record]:
    """Take the records that the format of a file is recognised by: the first thousand, fewer of very long ones."""
    return next(chunked(records, PROBE, lambda record: bytes_in_memory(record.value), PROBE_BYTES), [])


def detect(records: Sequence[Record], where: str) -> Format:
    """Return the format of nearly all of the first thousand records that have one.

    Raises:
        DataError: None of them is of a known format (the message names those), or too many are of another.
    """
    readable = [record for record in records[:PROBE] if not record.problem]
    # A row whose reply is missing looks like one of a format that has none.
    whole = [record for record in readable if not missing_replies(record.value)]
    counts = Counter(shape.name for record in whole or readable if (shape := format_of(record.value)))
    if not counts:
        counts = Counter(shape.name for record in readable if (shape := format_of(record.value)))
    if counts:
        name, count = counts.most_common(1)[0]
        if count >= MAJORITY * counts.total():
            return format_named(name)
        listed = ", ".join(f"{count} {name}" for name, count in counts.most_common())
        raise DataError(
            f"{where}: the first {len(readable)} rows are of several formats ({listed}); split the file, or name one "
            "of them (format: beside the path in collect.files), which refuses the other rows"
        )
    names = ", ".join(shape.name for shape in FORMATS)
    known = (
        "name its columns (--column prompt=question --column chosen=good …, or columns: {prompt: question, …} beside "
        f"the path), or give one of the known formats of docs/data-formats.md: {names}"
    )
    if not readable:
        problem = records[0].problem if records else "there are no rows"
        raise DataError(
            f"{where}, row {records[0].position if records else 0}: {problem}; no row before row {PROBE} can be read: "
            "correct the file, or the columns that are named for it"
        )
    first = readable[0]
    is_list = isinstance(first.value, list) and all(isinstance(row, dict) for row in first.value)
    hint = " (JSON lines have a row in each; a file that is one list of rows is named .json)" if is_list else ""
    raise DataError(f"{where}, row {first.position} ({record_shape(first.value)}) is of no known format{hint}; {known}")


def missing_replies(value: Any) -> list[str]:
    """Return the columns of a record that are named as replies are and hold null."""
    if not isinstance(value, dict):
        return []
    return [name for name in (*PAIR, *REPLY_NAMES) if name in value and is_missing(value[name])]


def pair_columns(records: Sequence[Record]) -> tuple[str, str] | None:
    """Return the columns of prompts that hold a better and a worse reply by their names; None if none do."""
    for record in records[:PROBE]:
        if record.problem or not isinstance(record.value, dict):
            continue
        names = {str(name).strip().casefold(): str(name) for name, value in record.value.items() if value}
        for better, worse in PAIR_NAMES:
            if better in names and worse in names:
                return names[better], names[worse]
    return None


def reply_columns(records: Sequence[Record]) -> list[str]:
    """Return the columns of prompts that seem to hold several replies each or together, by their names and values."""
    for record in records[:PROBE]:
        if record.problem or not isinstance(record.value, dict):
            continue
        named = {str(name): value for name, value in record.value.items() if _REPLY_COLUMN.search(str(name).strip())}
        lists = [name for name, value in named.items() if isinstance(value, list) and len(value) > 1]
        texts = [name for name, value in named.items() if isinstance(value, str) and value.strip()]
        if lists or len(texts) > 1:
            return lists or texts
    return []


def format_of(value: Any) -> Format | None:
    """Return the format of a record: the first that it matches."""
    return next((shape for shape in FORMATS if shape.matches(value)), None)


def format_named(name: str) -> Format:
    """Return the format of that name."""
    return next(shape for shape in FORMATS if shape.name == name)
