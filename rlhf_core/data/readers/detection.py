"""Which format a file has, a user's own names for its columns, and which columns are not read."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from rlhf_core.config.data import ReadOptions, template_columns
from rlhf_core.data.readers.formats import REPLY_NAMES, Format, Needs, Undecided
from rlhf_core.data.readers.labels import may_be_flag, read_flags, score_columns, words_of
from rlhf_core.data.readers.residues import AS_TEXT
from rlhf_core.data.readers.shapes import FORMATS
from rlhf_core.data.readers.turns import (
    LOST_PARTS,
    Refusal,
    dialogue_as_json,
    is_missing,
    names_in,
    text_of,
)
from rlhf_core.data.row_counts import Record, RowCounts
from rlhf_core.data.tables import bytes_in_memory, chunked
from rlhf_core.errors import DataError, RlhfError
from rlhf_core.plugins import READERS, PluginError, described, load_plugin
from rlhf_core.runtime.user_function import describe_failure

# Of the first so many records that have a format, this share must have the same.
PROBE = 1000
PROBE_BYTES = 256 * 2**20
MAJORITY = 0.9
KEY_LENGTH = 60
PAIR = ("chosen", "rejected")
# Words for a better and a worse reply, alone or as in pos_resp, chosen_answer and response_w.
BETTER_WORSE = (
    PAIR,
    ("pos", "neg"),
    ("positive", "negative"),
    ("preferred", "dispreferred"),
    ("preferred", "rejected"),
    ("accepted", "rejected"),
    ("winner", "loser"),
    ("win", "lose"),
    ("better", "worse"),
    ("good", "bad"),
    ("best", "worst"),
    ("correct", "incorrect"),
    ("w", "l"),
)
REPLY_WORDS = (
    r"chosen|rejected|response|resp|reply|replie|answer|output|completion|candidate|generation|winner|loser|messages|"
    r"conversation|dialogue"
)
# Names such as response_a, model_2_answer, reply1 and completions, but not answer_type or
# output_format.
REPLY_COLUMN = re.compile(
    rf"(?:^|[\W_\d])(?:{REPLY_WORDS})s?(?:[\W_]?(?:\d\d?|[abwl]|text))?$", re.IGNORECASE
)
# Words in the names of columns that may hold the reply to a prompt.
SINGLE_WORDS = frozenset({"assistant", "target", "solution", "truth"})
# Words in the names of columns that may hold a better or a worse reply, as in revised_answer.
OTHER_WORDS = frozenset(
    {"rejected", "corrected", "correction", "revised", "revision", "edited", "improved", "worse"}
)
# Two candidates such as a and b, model_1 and model_2, left and right. Another column says which of
# them is better.
CANDIDATES = (
    ("a", "b"),
    ("0", "1"),
    ("1", "2"),
    ("left", "right"),
    ("first", "second"),
    ("one", "two"),
    ("x", "y"),
)
VERDICT = re.compile(
    r"(?:^|[\W_])(?:choice|chosen|choose|winner|win|prefer\w*|better|best|labels?|vote|verdict|pick\w*|select\w*|"
    r"decision|judge?ment|annotation|ranking|rank|answer|correct|favou?rite)(?:$|[\W_])",
    re.IGNORECASE,
)


def first_records(records: Iterable[Record]) -> list[Record]:
    """Take the records that tell the format of a file: the first thousand, or fewer long ones."""
    chunks = chunked(records, PROBE, lambda record: bytes_in_memory(record.value), PROBE_BYTES)
    return next(chunks, [])


def recognised(first: Sequence[Record], options: ReadOptions, where: str) -> Format:
    """Return the format that ``options`` name, or that of nearly all of the ``first`` records.

    Raises:
        DataError: No record has a column that ``options`` name; or none is of a known format (the
            message names these); or too many are of another.
    """
    require_columns(first, options, where)
    if options.format:
        return format_named(options.format)
    named = [mapped(record, options) for record in first]
    readable = [record for record in named if not record.problem]
    if not readable:
        raise _no_row_to_read(named, options, where)
    # A row whose reply is missing looks like one of a format that has none.
    whole = [record for record in readable if not missing_replies(record.value)]
    counts = _counted(whole) or _counted(readable)
    if not counts:
        raise _of_no_format(readable[0], where)
    name, count = counts.most_common(1)[0]
    if count >= MAJORITY * counts.total():
        return format_named(name)
    found = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    raise DataError(
        f"{where}: the first {len(readable)} rows are of several formats ({found}); split the file, or name one "
        "of them (--format, or format: beside the path in collect.files), which refuses the other rows"
    )


def _counted(records: Sequence[Record]) -> Counter[str]:
    shapes = [format_of(record.value) for record in records]
    return Counter(shape.name for shape in shapes if shape is not None)


def _no_row_to_read(first: Sequence[Record], options: ReadOptions, where: str) -> DataError:
    """Return the error for a file none of whose first records can be read."""
    if first:
        record = first[0]
    else:
        record = Record(0, None, "there are no rows")
    rows = "its only row cannot be read"
    if len(first) > 1:
        which = "the first" if len(first) == PROBE else "its"
        rows = f"none of {which} {len(first)} rows can be read"
    remedy = "correct the file"
    if options.columns or options.template:
        remedy += ", or the columns that are named for it"
    return DataError(f"{where}, row {record.position}: {record.problem}; {rows}: {remedy}")


def _of_no_format(record: Record, where: str) -> DataError:
    """Return the error for a file whose records are of no known format, as its first shows."""
    hint = ""
    value = record.value
    if isinstance(value, list) and all(isinstance(row, dict) for row in value):
        hint = " (JSON lines have a row in each; a file that is one list of rows is named .json)"
    elif isinstance(value, dict):
        for name, item in value.items():
            if isinstance(item, str) and (written := dialogue_as_json(item)):
                hint = f" (its column {name!r} {written})"
    known = ", ".join(shape.name for shape in FORMATS)
    return DataError(
        f"{where}, row {record.position} ({record_shape(value)}) is of no known format{hint}; name its columns "
        "(--column prompt=question --column chosen=good …, or columns: {prompt: question, …} beside the path), or give "
        f"one of the known formats of docs/data-formats.md: {known}"
    )


def record_shape(value: Any) -> str:
    """Return the keys of a record, with the types of values that are no text."""
    if not isinstance(value, dict):
        return type(value).__name__
    keys = []
    for name, item in value.items():
        kind = "" if isinstance(item, str) else f" ({type(item).__name__})"
        keys.append(str(name)[:KEY_LENGTH] + kind)
    return f"keys {listed(keys)}"


def missing_replies(value: Any) -> list[str]:
    """Return the columns of a record that have a reply's name and hold null."""
    if not isinstance(value, dict):
        return []
    return [name for name in (*PAIR, *REPLY_NAMES) if name in value and is_missing(value[name])]


def unread_replies(first: Sequence[Record], options: ReadOptions, shape: Format) -> str:
    """Say which columns of a file of prompts or texts look like replies; empty if none do."""
    if shape.name not in ("prompt", "text") or options.columns:
        return ""
    for value in _objects(first):
        if unread := _unread_replies(value, shape.name):
            return unread
    return ""


def other_replies(first: Sequence[Record], options: ReadOptions, shape: Format) -> str:
    """Say which further columns of prompts or single replies look like replies; empty if none."""
    if options.columns or not (shape.is_single or shape.name == "prompt"):
        return ""
    found = set()
    for value in _objects(first):
        for column in value.keys() - shape.read:
            if not value[column] or not isinstance(value[column], str | list | dict):
                continue
            name = str(column)
            if shape.is_single:
                is_other = not OTHER_WORDS.isdisjoint(words_of(name))
            elif REPLY_COLUMN.search(name.strip()):
                is_other = True
            else:
                is_other = not SINGLE_WORDS.isdisjoint(words_of(name))
            if is_other:
                found.add(name)
    if not found:
        return ""
    names = listed(sorted(found))
    if shape.is_single:
        return (
            f"{names} may be a better or a worse reply, and is not read: name the columns to read pairs "
            "(--column chosen=… --column rejected=…)"
        )
    return (
        f"{names} may be the reply to a prompt, and is kept for reward functions alone; to imitate it, name the "
        "columns (--column prompt=… --column reply=…)"
    )


def _objects(records: Sequence[Record]) -> Iterator[dict[str, Any]]:
    for record in records:
        if not record.problem and isinstance(record.value, dict):
            yield record.value


def _unread_replies(record: Mapping[str, Any], own: str) -> str:
    """Say which columns of a record other than its ``own`` look like replies; empty if none do."""
    names = {}
    texts = {}
    for name, value in record.items():
        if value and name != own and isinstance(value, str | list | dict):
            names[name.strip().casefold()] = name
    for key, name in names.items():
        if isinstance(record[name], str) and record[name].strip():
            texts[key] = name
    for better, worse in BETTER_WORSE:
        for key, name in names.items():
            if better not in key:
                continue
            other = re.sub(rf"(?<![a-z]){better}(?![a-z])", worse, key)
            if other != key and other in names:
                return (
                    f"its columns {name!r} and {names[other]!r} look like a better and a worse reply: name them "
                    f"(--column prompt={own} --column 'chosen={name}' --column 'rejected={names[other]}')"
                )
    for verdict, value in record.items():
        if not VERDICT.search(verdict) or is_missing(value):
            continue
        others = {key: name for key, name in texts.items() if name != verdict}
        candidates = _two_candidates(others)
        if not candidates and len(others) > 1 and str(value).strip().casefold() in others:
            candidates = [*others.values()]
        if candidates:
            return (
                f"its column {verdict!r} seems to say which of {', '.join(map(repr, candidates))} is the better reply: "
                "bring them to a format of docs/data-formats.md, such as prompt, response_0, response_1 and "
                "better_response_id (0 or 1)"
            )
    replies = [name for name in names.values() if REPLY_COLUMN.search(name.strip())]
    lists = [name for name in replies if _is_list(record[name])]
    unread = lists or [name for name in texts.values() if name in replies]
    if lists or len(unread) > 1:
        look = "looks" if len(unread) == 1 else "look"
        return (
            f"{', '.join(map(repr, unread))} {look} like replies: bring them to a format of docs/data-formats.md "
            "(--column chosen=… --column rejected=… where each has a column of its own)"
        )
    return ""


def _two_candidates(columns: Mapping[str, str]) -> list[str]:
    """Return two columns whose names differ as those of candidates do; none if there are no two."""
    for first, second in CANDIDATES:
        for key, name in columns.items():
            other = key.removesuffix(first) + second
            if key.endswith(first) and other in columns:
                return [name, columns[other]]
    return []


def _is_list(value: Any) -> bool:
    """Return whether a value is a list of several items, or such a list written out as text."""
    if isinstance(value, str):
        return value.startswith("[") and value.endswith("]") and "," in value
    return isinstance(value, list) and len(value) > 1


def format_of(value: Any) -> Format | None:
    """Return the format of a record: the first that it matches."""
    return next((shape for shape in FORMATS if shape.matches(value)), None)


def format_named(name: str) -> Format:
    """Return the format of that name."""
    for known in FORMATS:
        if known.name == name:
            return known
    shape = load_plugin(READERS, name)
    if not isinstance(shape, Format):
        raise PluginError(
            f"the reader {name} of a plugin is no Format but a {type(shape).__name__}"
        )
    matches = shape.matches
    if not isinstance(matches, Needs):  # which cannot fail, and says which columns are read
        matches = partial(_of_plugin, name, matches)
    return replace(shape, name=name, matches=matches, parse=partial(_of_plugin, name, shape.parse))


def _of_plugin(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of a plugin's reader, whose own failures are named."""
    try:
        return function(*arguments)
    except (Refusal, Undecided, RlhfError):
        raise
    except (Exception, SystemExit) as error:  # whatever the code of others raises
        raise PluginError(
            f"the reader {described(READERS, name)} {describe_failure(error)}; correct that package, or name another "
            "format"
        ) from error


LISTED_COLUMNS = 20
# What looks like a residue of an export is not mentioned if a smaller share of the rows has it:
# then people wrote it.
RARE = 0.01
NAME_LENGTH = 80
TEXT_LABELS = ("category", "source")
# Columns that may hold turns.
DIALOGUES = names_in(
    "prompt chosen rejected reply completion response messages conversations context"
)
TURN_KEYS = frozenset({"role", "from", "content", "value", *LOST_PARTS})
PART_KEYS = frozenset({"type", "text", *LOST_PARTS})
NOTHING: tuple[Any, ...] = (None, "", [], {})


def require_columns(records: Sequence[Record], options: ReadOptions, where: str) -> None:
    """Raise ``DataError`` if no record has a column that ``options`` name."""
    readable = [record.value for record in records if not record.problem]
    columns = list(options.columns.values())
    if options.template:
        columns += template_columns(options.template)
    for column in columns:
        if readable and not any(_has_column(value, column) for value in readable):
            names: set[str] = set()
            for value in _objects(records):
                names.update(map(str, value))
            raise DataError(
                f"{where}: no row has a column {column!r}; the columns are {listed(sorted(names))}"
            )


def _has_column(value: Any, column: str) -> bool:
    with suppress(Refusal):
        _column(value, column)
        return True
    return False


def _column(value: Any, column: str) -> Any:
    """Return the value of a column; if no column has the whole name, dots lead into objects."""
    if isinstance(value, dict) and column in value:
        return value[column]
    first, dot, rest = column.partition(".")
    if not dot or not isinstance(value, dict) or first not in value:
        raise Refusal(f"there is no column {column!r}")
    return _column(value[first], rest)


def mapped(record: Record, options: ReadOptions) -> Record:
    """Return a record with the fields that ``options.columns`` and ``options.template`` name alone.

    A record that lacks a column keeps its value, and has that as its problem.
    """
    if record.problem or (not options.columns and options.template is None):
        return record
    try:
        fields = {field: _column(record.value, column) for field, column in options.columns.items()}
        if options.template is not None:
            parts = []
            # str.format would take a dot in a name for an attribute.
            for literal, name, _, _ in string.Formatter().parse(options.template):
                parts.append(literal)
                if name is not None:
                    parts.append(text_of(_column(record.value, name), f"the column {name}"))
            fields["prompt"] = "".join(parts)
    except Refusal as refusal:
        return Record(record.position, record.value, str(refusal))
    return Record(record.position, fields)


def listed(names: Sequence[str]) -> str:
    """Return the first twenty names, and how many more there are."""
    if not names:
        return "none"
    more = f" and {len(names) - LISTED_COLUMNS} more" if len(names) > LISTED_COLUMNS else ""
    return printable(", ".join(names[:LISTED_COLUMNS])) + more


def printable(text: str) -> str:
    """Return ``text`` as every terminal can print it: halves of surrogate pairs as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def unused_columns(value: Any, shape: Format) -> list[str]:
    """Return the columns of a record that hold something and are not read.

    A key of the turns in a column is listed as ``prompt[].name``, a flag in another object as
    ``metadata.name``. A category or source that is no text is not read either.
    """
    if not isinstance(value, dict):
        return []
    read = shape.read | read_flags(value, shape.is_single)
    for scores in score_columns(tuple(value)):
        read = read.union(scores)
    unused = list(_filled(value, read))
    for name in tuple(unused):
        item = value.get(name)
        if isinstance(item, dict):
            unused += [f"{name}.{key}" for key in item if may_be_flag(str(key))]
    for name in TEXT_LABELS:
        if value.get(name) not in NOTHING and not isinstance(value[name], str):
            unused.append(name)
    if shape.name != "oasst-trees":
        of_turns: set[str] = set()
        for name in shape.read.intersection(DIALOGUES):
            of_turns.update(_unused_turn_keys(name, value.get(name)))
        unused += of_turns - read
    return [printable(name)[:NAME_LENGTH] for name in unused]


def _filled(value: dict[str, Any], read: Collection[str]) -> Iterator[str]:
    """Yield the keys of an object that hold something and are not ``read``."""
    for name in value.keys() - read:
        if value[name] not in NOTHING:
            yield str(name)


def _unused_turn_keys(column: str, turns: Any) -> Iterator[str]:
    """Yield the keys of turns in a column, and of parts of their texts, that are not read."""
    for turn in turns if isinstance(turns, list) else [turns]:
        if not isinstance(turn, dict):
            continue
        for key in _filled(turn, TURN_KEYS):
            yield f"{column}[].{key}"
        text = "content" if "content" in turn else "value"
        parts = turn.get(text)
        for part in parts if isinstance(parts, list) else []:
            if isinstance(part, dict):
                for key in _filled(part, PART_KEYS):
                    yield f"{column}[].{text}[].{key}"


def is_flag(column: str) -> bool:
    """Return whether a column may say how good a reply is, or whether it is to be learned."""
    return may_be_flag(column.rpartition("[].")[2].rpartition(".")[2])


def commonest_unused(unused: Mapping[str, int]) -> dict[str, int]:
    """Return at most ``LISTED_COLUMNS`` columns: flags first, then the most common ones.

    Args:
        unused: How many rows have something in each column.
    """
    ordered = sorted(unused.items(), key=lambda item: (not is_flag(item[0]), -item[1], item[0]))
    return dict(ordered[:LISTED_COLUMNS])


def unused_summary(unused: Mapping[str, int]) -> dict[str, Any]:
    """Return the commonest columns as JSON has them, and how many there are if that is more."""
    if len(unused) <= LISTED_COLUMNS:
        return {"unused": dict(unused)}
    return {"unused": commonest_unused(unused), "unused_columns": len(unused)}


def warnings_of(counts: RowCounts) -> list[str]:
    """Return what to look at before training on a source, a sentence each with its rows' number."""
    warnings = []
    for name, count in commonest_unused(counts.unused).items():
        if is_flag(name):
            about = "may say how good a reply is or whether it is to be learned"
            warnings.append(f"{count}: {name} {about}, and is not read")
    for what, count in counts.noticed.most_common():
        if not what.endswith(AS_TEXT) or count >= RARE * counts.kept:
            warnings.append(f"{count}: {what}")
    return warnings


def unused_lines(counts: RowCounts) -> list[str]:
    """Return a sentence for each of the commonest unread columns, and one for the rest."""
    commonest = commonest_unused(counts.unused).items()
    lines = [f"{count}: the column {name} is not read" for name, count in commonest]
    if len(counts.unused) > LISTED_COLUMNS:
        lines.append(f"{len(counts.unused) - LISTED_COLUMNS} further columns are not read")
    return lines
