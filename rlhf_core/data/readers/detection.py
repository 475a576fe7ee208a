"""Which format a record or a file has, a user's own names for its columns, and which columns are
not read.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from rlhf_core.config.data import ReadOptions, template_columns
from rlhf_core.data.readers.formats import REPLY_NAMES, Format
from rlhf_core.data.readers.labels import may_be_flag, read_flags, score_columns, words_of
from rlhf_core.data.readers.residues import AS_TEXT
from rlhf_core.data.readers.shapes import FORMATS
from rlhf_core.data.readers.turns import LOST_PARTS, Refusal, dialogue_as_json, is_missing, text_of
from rlhf_core.data.row_counts import Record, RowCounts
from rlhf_core.data.tables import bytes_in_memory, chunked
from rlhf_core.errors import DataError
from rlhf_core.plugins import READERS, PluginError, load_plugin

# The format of a file is that of this share of the records that have one, among the first so many.
PROBE = 1000
PROBE_BYTES = 256 * 2**20
MAJORITY = 0.9
KEY_LENGTH = 60
PAIR = ("chosen", "rejected")
# Words for a better and a worse reply, alone or as in pos_resp, chosen_answer and response_w.
BETTER_WORSE = (
    *(
        PAIR,
        ("pos", "neg"),
        ("positive", "negative"),
        ("preferred", "dispreferred"),
        ("preferred", "rejected"),
    ),
    *(
        ("accepted", "rejected"),
        ("winner", "loser"),
        ("win", "lose"),
        ("better", "worse"),
        ("good", "bad"),
    ),
    *(("best", "worst"), ("correct", "incorrect"), ("w", "l")),
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
# Of columns that may hold the reply to a prompt, and of those that may hold a better or worse one:
# revised_answer.
SINGLE_WORDS = frozenset({"assistant", "target", "solution", "truth"})
OTHER_WORDS = frozenset(
    {"rejected", "corrected", "correction", "revised", "revision", "edited", "improved", "worse"}
)
# Two candidates such as a and b, model_1 and model_2, left and right, where another column says
# which is better.
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
    """Take the records that the format of a file is recognised by: the first thousand, fewer of
    very long ones.
    """
    return next(
        chunked(records, PROBE, lambda record: bytes_in_memory(record.value), PROBE_BYTES), []
    )


def recognised(first: Sequence[Record], options: ReadOptions, where: str) -> Format:
    """Return the format of a file: the one that ``options`` name, or that of nearly all of its
    ``first`` records.

    Raises:
        DataError: None of them has a column that ``options`` name, or is of a known format (the
            message names those), or too many are of another.
    """
    require_columns(first, options, where)
    if options.format:
        return format_named(options.format)
    named = [mapped(record, options) for record in first]
    readable = [record for record in named if not record.problem]
    # A row whose reply is missing looks like one of a format that has none.
    whole = [record for record in readable if not missing_replies(record.value)]
    counts = _counted(whole) or _counted(readable)
    if counts:
        name, count = counts.most_common(1)[0]
        if count >= MAJORITY * counts.total():
            return format_named(name)
        raise DataError(
            f"{where}: the first {len(readable)} rows are of several formats "
            f"({', '.join(f'{count} {name}' for name, count in counts.most_common())}); split the file, or name one "
            "of them (--format, or format: beside the path in collect.files), which refuses the other rows"
        )
    if not readable:
        record = mapped(first[0], options) if first else Record(0, None, "there are no rows")
        rows = (
            f"none of {'the first' if len(first) == PROBE else 'its'} {len(first)} rows can be read"
        )
        raise DataError(
            f"{where}, row {record.position}: {record.problem}; "
            f"{rows if len(first) > 1 else 'its only row cannot be read'}: correct the file"
            + (
                ", or the columns that are named for it"
                if options.columns or options.template
                else ""
            )
        )
    value = readable[0].value
    is_list = isinstance(value, list) and all(isinstance(row, dict) for row in value)
    hint = (
        " (JSON lines have a row in each; a file that is one list of rows is named .json)"
        if is_list
        else ""
    )
    for name, item in value.items() if isinstance(value, dict) else ():
        if isinstance(item, str) and (written := dialogue_as_json(item)):
            hint = f" (its column {name!r} {written})"
    raise DataError(
        f"{where}, row {readable[0].position} ({record_shape(value)}) is of no known format{hint}; name its columns "
        "(--column prompt=question --column chosen=good …, or columns: {prompt: question, …} beside the path), or give "
        f"one of the known formats of docs/data-formats.md: {', '.join(shape.name for shape in FORMATS)}"
    )


def _counted(records: Sequence[Record]) -> Counter[str]:
    return Counter(shape.name for record in records if (shape := format_of(record.value)))


def record_shape(value: Any) -> str:
    """Return the keys of a record, with the types of values other than text, or the type of another
    value.
    """
    if not isinstance(value, dict):
        return type(value).__name__
    types = (
        ("" if isinstance(item, str) else f" ({type(item).__name__})") for item in value.values()
    )
    return f"keys {listed([str(name)[:KEY_LENGTH] + kind for name, kind in zip(value, types, strict=True)])}"


def missing_replies(value: Any) -> list[str]:
    """Return the columns of a record that are named as replies are and hold null."""
    if not isinstance(value, dict):
        return []
    return [name for name in (*PAIR, *REPLY_NAMES) if name in value and is_missing(value[name])]


def unread_replies(first: Sequence[Record], options: ReadOptions, shape: Format) -> str:
    """Say which columns of a file that is read as prompts or texts look like replies; empty where
    none do.
    """
    if shape.name not in ("prompt", "text") or options.columns:
        return ""
    records = [
        record.value for record in first if not record.problem and isinstance(record.value, dict)
    ]
    return next(filter(None, (_unread_replies(value, shape.name) for value in records)), "")


def other_replies(first: Sequence[Record], options: ReadOptions, shape: Format) -> str:
    """Say which further columns of prompts or single replies look like replies; empty if none
    do.
    """
    if options.columns or not (shape.is_single or shape.name == "prompt"):
        return ""

    def is_other(name: str) -> bool:
        if shape.is_single:
            return not OTHER_WORDS.isdisjoint(words_of(name))
        return bool(REPLY_COLUMN.search(name.strip())) or not SINGLE_WORDS.isdisjoint(
            words_of(name)
        )

    values = [
        record.value for record in first if not record.problem and isinstance(record.value, dict)
    ]
    held = set()
    for value in values:
        for name in value.keys() - shape.read:
            if isinstance(value[name], str | list | dict) and value[name]:
                held.add(str(name))
    names = listed(sorted(filter(is_other, held)))
    if names == listed([]):
        return ""
    if shape.is_single:
        return (
            f"{names} may be a better or a worse reply, and is not read: name the columns to read pairs "
            "(--column chosen=… --column rejected=…)"
        )
    return (
        f"{names} may be the reply to a prompt, and is kept for reward functions alone; to imitate it, name the "
        "columns (--column prompt=… --column reply=…)"
    )


def _unread_replies(record: Mapping[str, Any], own: str) -> str:
    held = {name: value for name, value in record.items() if value and name != own}
    names = {
        name.strip().casefold(): name
        for name, value in held.items()
        if isinstance(value, str | list | dict)
    }
    texts = {
        key: name
        for key, name in names.items()
        if isinstance(record[name], str) and record[name].strip()
    }
    for better, worse in BETTER_WORSE:
        for key, name in names.items():
            other = re.sub(rf"(?<![a-z]){better}(?![a-z])", worse, key) if better in key else key
            if other != key and other in names:
                return (
                    f"its columns {name!r} and {names[other]!r} look like a better and a worse reply: name them "
                    f"(--column prompt={own} --column 'chosen={name}' --column 'rejected={names[other]}')"
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
    for verdict in (
        name for name, value in record.items() if VERDICT.search(name) and not is_missing(value)
    ):
        others = {key: name for key, name in texts.items() if name != verdict}
        two = [
            [name, others[other]]
            for first, second in CANDIDATES
            for key, name in others.items()
            if key.endswith(first) and (other := key.removesuffix(first) + second) in others
        ]
        named = (
            [*others.values()]
            if len(others) > 1 and str(record[verdict]).strip().casefold() in others
            else []
        )
        if found := [*two, named][0]:
            return (
                f"its column {verdict!r} seems to say which of {', '.join(map(repr, found))} is the better reply: "
                "bring them to a format of docs/data-formats.md, such as prompt, response_0, response_1 and "
                "better_response_id"
            )
    return ""


def _is_list(value: Any) -> bool:
    """Return whether a value is a list of several items, or one that is written out as text."""
    if isinstance(value, str):
        return value.startswith("[") and value.endswith("]") and "," in value
    return isinstance(value, list) and len(value) > 1


def format_of(value: Any) -> Format | None:
    """Return the format of a record: the first that it matches."""
    return next((shape for shape in FORMATS if shape.matches(value)), None)


def format_named(name: str) -> Format:
    """Return the format of that name."""
    own = next((shape for shape in FORMATS if shape.name == name), None)
    if own is not None:
        return own
    shape = load_plugin(READERS, name)
    if not isinstance(shape, Format):
        raise PluginError(
            f"the reader {name} of a plugin is no Format but a {type(shape).__name__}"
        )
    return replace(shape, name=name)


LISTED_COLUMNS = 20
# What a text may have been left with by an export is not worth a word where fewer rows have it:
# people wrote it.
RARE = 0.01
NAME_LENGTH = 80
TEXT_LABELS = ("category", "source")
DIALOGUES = (
    "prompt",
    "chosen",
    "rejected",
    "reply",
    "completion",
    "response",
    "messages",
    "conversations",
    "context",
)
TURN_KEYS = frozenset({"role", "from", "content", "value", *LOST_PARTS})
PART_KEYS = frozenset({"type", "text", *LOST_PARTS})
NOTHING: tuple[Any, ...] = (None, "", [], {})


def require_columns(records: Sequence[Record], options: ReadOptions, where: str) -> None:
    """Raise ``DataError`` where none of some records has a column that ``options`` name."""
    readable = [record.value for record in records if not record.problem]
    for column in [
        *options.columns.values(),
        *(template_columns(options.template) if options.template else ()),
    ]:
        if readable and not any(_holds(value, column) for value in readable):
            names = sorted(
                {str(name) for value in readable if isinstance(value, dict) for name in value}
            )
            raise DataError(
                f"{where}: no row has a column {column!r}; the columns are {listed(names)}"
            )


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
    """Return a record with the fields that ``options.columns`` and ``options.template`` name, and
    with no others.

    One that lacks a column keeps its value and has that as its problem.
    """
    if record.problem or (not options.columns and options.template is None):
        return record
    try:
        fields = {field: _column(record.value, column) for field, column in options.columns.items()}
        if options.template is not None:
            # str.format would take a dot in a name for an attribute.
            fields["prompt"] = "".join(
                literal
                + (
                    text_of(_column(record.value, name), f"the column {name}")
                    if name is not None
                    else ""
                )
                for literal, name, _, _ in string.Formatter().parse(options.template)
            )
    except Refusal as refusal:
        return Record(record.position, record.value, str(refusal))
    return Record(record.position, fields)


def listed(names: Sequence[str]) -> str:
    """Return the first twenty names, and how many more there are."""
    more = f" and {len(names) - LISTED_COLUMNS} more" if len(names) > LISTED_COLUMNS else ""
    return printable(", ".join(names[:LISTED_COLUMNS])) + more if names else "none"


def printable(text: str) -> str:
    """Return ``text`` as every terminal can print it: half of a surrogate pair as its escape."""
    return text.encode("utf-8", "backslashreplace").decode()


def unused_columns(value: Any, shape: Format) -> list[str]:
    """Return the columns of a record that hold something and are not read.

    A key of the turns in a column is ``prompt[].name``, a flag in another object ``metadata.name``.
    A category or source that is no text is not read either.
    """
    if not isinstance(value, dict):
        return []
    flags = read_flags(value, shape.is_single)
    scores = {name for names in score_columns(tuple(value)) for name in names}
    unused = [
        str(name)
        for name in value.keys() - shape.read - flags - scores
        if value[name] not in NOTHING
    ]
    objects = ((name, item) for name in unused if isinstance(item := value.get(name), dict))
    unused += [
        f"{name}.{key}" for name, item in [*objects] for key in item if may_be_flag(str(key))
    ]
    unused += [
        name
        for name in TEXT_LABELS
        if value.get(name) not in NOTHING and not isinstance(value[name], str)
    ]
    if shape.name != "oasst-trees":
        of_turns = {
            key
            for name in DIALOGUES
            if name in shape.read
            for key in _unused_turn_keys(name, value.get(name))
        }
        unused += of_turns - flags
    return [printable(name)[:NAME_LENGTH] for name in unused]


def _unused_turn_keys(column: str, turns: Any) -> Iterator[str]:
    """Yield the keys of turns in a column, and of the parts of their texts, that hold something and
    are not read.
    """
    for turn in turns if isinstance(turns, list) else [turns]:
        if isinstance(turn, dict):
            yield from (
                f"{column}[].{key}" for key in turn.keys() - TURN_KEYS if turn[key] not in NOTHING
            )
            text = "content" if "content" in turn else "value"
            for part in turn[text] if isinstance(turn.get(text), list) else []:
                if isinstance(part, dict):
                    unused = (key for key in part.keys() - PART_KEYS if part[key] not in NOTHING)
                    yield from (f"{column}[].{text}[].{key}" for key in unused)


def is_flag(column: str) -> bool:
    """Whether a column that is not read may say how good a reply is, or whether it is to be
    learned.
    """
    return may_be_flag(column.rpartition("[].")[2].rpartition(".")[2])


def commonest_unused(unused: Mapping[str, int]) -> dict[str, int]:
    """Return ``LISTED_COLUMNS`` columns at most: flags first, then those that most rows have
    something in.

    Args:
        unused: By column, how many rows have something there.
    """
    ordered = sorted(unused.items(), key=lambda item: (not is_flag(item[0]), -item[1], item[0]))
    return dict(ordered[:LISTED_COLUMNS])


def unused_summary(unused: Mapping[str, int]) -> dict[str, Any]:
    """Return ``unused``, the commonest columns as JSON has them, and ``unused_columns``, how many
    if there are more.
    """
    if len(unused) <= LISTED_COLUMNS:
        return {"unused": dict(unused)}
    return {"unused": commonest_unused(unused), "unused_columns": len(unused)}


def warnings_of(counts: RowCounts) -> list[str]:
    """Return what somebody should look at before training on a source, a sentence each with how
    many rows it is.
    """
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
    """Return a sentence for each of the commonest columns that are not read, and one for all
    others.
    """
    lines = [
        f"{count}: the column {name} is not read"
        for name, count in commonest_unused(counts.unused).items()
    ]
    if len(counts.unused) > LISTED_COLUMNS:
        lines.append(f"{len(counts.unused) - LISTED_COLUMNS} further columns are not read")
    return lines
