"""All known formats, and which one a record or a file is of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from rlhf_core.data.chunks import bytes_in_memory, chunked
from rlhf_core.data.readers.comparisons import COMPARISONS
from rlhf_core.data.readers.content import Record
from rlhf_core.data.readers.format import Format, record_shape
from rlhf_core.data.readers.general import GENERAL
from rlhf_core.data.readers.rankings import MESSAGE_TREES, RANKINGS
from rlhf_core.errors import DataError

# The first that matches is used, so formats with more fields come first.
FORMATS = (*MESSAGE_TREES, *COMPARISONS, *RANKINGS, *GENERAL)
# The format of a file is that of this share of the records that have one, among the first so many.
PROBE = 1000
PROBE_BYTES = 256 * 2**20
MAJORITY = 0.9


def first_records(records: Iterable[Record]) -> list[Record]:
    """Take the records that the format of a file is recognised by: the first thousand, fewer of very long ones."""
    return next(chunked(records, PROBE, lambda record: bytes_in_memory(record.value), PROBE_BYTES), [])


def detect(records: Sequence[Record], where: str) -> Format:
    """Return the format of nearly all of the first thousand records that have one.

    Raises:
        DataError: None of them is of a known format (the message names those), or too many are of another.
    """
    readable = [record for record in records[:PROBE] if not record.problem]
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


def format_of(value: Any) -> Format | None:
    """Return the format of a record: the first that it matches."""
    return next((shape for shape in FORMATS if shape.matches(value)), None)


def format_named(name: str) -> Format:
    """Return the format of that name."""
    return next(shape for shape in FORMATS if shape.name == name)
