"""Columns of records: a user's own names for them, a template for the prompt, and columns that nothing reads."""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from rlhf_core.config.data import ReadOptions, template_columns
from rlhf_core.data.readers.content import Record
from rlhf_core.data.readers.formats import Format
from rlhf_core.data.readers.labels import may_be_flag, read_flags, score_columns
from rlhf_core.data.readers.residues import AS_TEXT
from rlhf_core.data.readers.turns import LOST_PARTS, Refusal, text_of
from rlhf_core.data.row_counts import RowCounts
from rlhf_core.errors import DataError

LISTED_COLUMNS = 20
# What a text may have been left with by an export is not worth a word where fewer rows have it: people wrote it.
RARE = 0.01
NAME_LENGTH = 80
TEXT_LABELS = ("category", "source")
DIALOGUES = ("prompt", "chosen", "rejected", "reply", "completion", "response", "messages", "conversations", "context")
TURN_KEYS = frozenset({"role", "from", "content", "value", *LOST_PARTS})
PART_KEYS = frozenset({"type", "text", *LOST_PARTS})
NOTHING: tuple[Any, ...] = (None, "", [], {})


def require_columns(records: Sequence[Record], options: ReadOptions, where: str) -> None:
    """Raise ``DataError`` where none of some records has a column that ``options`` name."""
    readable = [record.value for record in records if not record.problem]
    for column in [*options.columns.values(), *(template_columns(options.template) if options.template else ())]:
        if readable and not any(_holds(value, column) for value in readable):
            names = sorted({str(name) for value in readable if isinstance(value, dict) for name in value})
            raise DataError(f"{where}: no row has a column {column!r}; the columns are {listed(names)}")


def _holds(value: Any, column: str) -> bool:
    with suppress(Refusal):
        _column(value, column)
        return True
    return False


def _column(value: Any, column: str) -> Any:
    """Return the value of a column; where no column has the whole name, dots go into objects."""
    if isinstance(value, dict) and column in value:
        return value[column]
    first, dot, rest = column.partition(".")
    if not dot or not isinstance(value, dict) or first not in value:
        raise Refusal(f"there is no column {column!r}")
    return _column(value[first], rest)


def mapped(record: Record, options: ReadOptions) -> Record:
    """Return a record with the fields that ``options.columns`` and ``options.template`` name, and with no others.

    One that lacks a column keeps its value and has that as its problem.
    """
    if record.problem or (not options.columns and options.template is None):
        return record
    try:
        fields = {field: _column(record.value, column) for field, column in options.columns.items()}
        if options.template is not None:
            # str.format would take a dot in a name for an attribute.
            fields["prompt"] = "".join(
                literal + (text_of(_column(record.value, name), f"the column {name}") if name is not None else "")
                for literal, name, _, _ in string.Formatter().parse(options.template)
            )
    except Refusal as refusal:
        return Record(record.position, record.value, str(refusal))
    return Record(record.position, fields)


def listed(names: Sequence[str]) -> str:
    """Return the first twenty names, and how many there are beside them."""
    more = f" and {len(names) - LISTED_COLUMNS} more" if len(names) > LISTED_COLUMNS else ""
    return printable(", ".join(names[:LISTED_COLUMNS])) + more if names else "none"


def printable(text: str) -> str:
    """Return ``text`` as every terminal can print it: half of a surrogate pair as its escape."""
    return text.encode("utf-8", "backslashreplace").decode()


def unused_columns(value: Any, shape: Format) -> list[str]:
    """Return the columns of a record that hold something and are not read.

    A key of the turns in a column is ``prompt[].name``, a flag in another object ``metadata.name``. A category or
    source that is no text is not read either.
    """
    if not isinstance(value, dict):
        return []
    flags = read_flags(value, shape.is_single)
    scores = {name for names in score_columns(tuple(value)) for name in names}
    unused = [str(name) for name in value.keys() - shape.read - flags - scores if value[name] not in NOTHING]
    objects = ((name, item) for name in unused if isinstance(item := value.get(name), dict))
    unused += [f"{name}.{key}" for name, item in [*objects] for key in item if may_be_flag(str(key))]
    unused += [name for name in TEXT_LABELS if value.get(name) not in NOTHING and not isinstance(value[name], str)]
    if shape.name != "oasst-trees":
        of_turns = {key for name in DIALOGUES if name in shape.read for key in _unused_turn_keys(name, value.get(name))}
        unused += of_turns - flags
    return [printable(name)[:NAME_LENGTH] for name in unused]


def _unused_turn_keys(column: str, turns: Any) -> Iterator[str]:
    """Yield the keys of turns in a column, and of the parts of their texts, that hold something and are not read."""
    for turn in turns if isinstance(turns, list) else [turns]:
        if isinstance(turn, dict):
            yield from (f"{column}[].{key}" for key in turn.keys() - TURN_KEYS if turn[key] not in NOTHING)
            text = "content" if "content" in turn else "value"
            for part in turn[text] if isinstance(turn.get(text), list) else []:
                if isinstance(part, dict):
                    unused = (key for key in part.keys() - PART_KEYS if part[key] not in NOTHING)
                    yield from (f"{column}[].{text}[].{key}" for key in unused)


def _is_flag(column: str) -> bool:
    return may_be_flag(column.rpartition("[].")[2].rpartition(".")[2])


def commonest_unused(unused: Mapping[str, int]) -> dict[str, int]:
    """Return ``LISTED_COLUMNS`` columns at most: flags first, then those that most rows have something in.

    Args:
        unused: By column, how many rows have something there.
    """
    ordered = sorted(unused.items(), key=lambda item: (not _is_flag(item[0]), -item[1], item[0]))
    return dict(ordered[:LISTED_COLUMNS])


def unused_summary(unused: Mapping[str, int]) -> dict[str, Any]:
    """Return ``unused``, the commonest columns as JSON has them, and ``unused_columns``, how many if there are more."""
    if len(unused) <= LISTED_COLUMNS:
        return {"unused": dict(unused)}
    return {"unused": commonest_unused(unused), "unused_columns": len(unused)}


def warnings_of(counts: RowCounts) -> list[str]:
    """Return what somebody should look at before training on a source, a sentence each with how many rows it is."""
    return [
        *(
            f"{count}: {name} may say how good a reply is or whether it is to be learned, and is not read"
            for name, count in commonest_unused(counts.unused).items()
            if _is_flag(name)
        ),
        *(
            f"{count}: {what}"
            for what, count in counts.noticed.most_common()
            if not what.endswith(AS_TEXT) or count >= RARE * counts.kept
        ),
    ]


def unused_lines(counts: RowCounts) -> list[str]:
    """Return a sentence for each of the commonest columns that are not read, and one for all others."""
    lines = [f"{count}: the column {name} is not read" for name, count in commonest_unused(counts.unused).items()]
    if len(counts.unused) > LISTED_COLUMNS:
        lines.append(f"{len(counts.unused) - LISTED_COLUMNS} further columns are not read")
    return lines
