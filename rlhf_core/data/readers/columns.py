"""Columns of records: a user's own names for them, a template for the prompt, and columns that nothing reads."""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlhf_core.config.data import ReadOptions, template_columns
from rlhf_core.data.readers.content import Record
from rlhf_core.data.readers.format import listed
from rlhf_core.data.readers.labels import FLAGS, key_of, read_flags
from rlhf_core.data.readers.turns import LOST_PARTS, Refusal, text_of
from rlhf_core.data.row_counts import RowCounts
from rlhf_core.errors import DataError

PROBE = 1000
LISTED_COLUMNS = 20
NAME_LENGTH = 80
REPLIES = "chosen rejected"
# Read in every format, for one kind of rows or another.
LABELS = (
    "system source category margin score_chosen score_rejected chosen_score rejected_score "
    "chosen-rating rejected-rating chosen_rating rejected_rating chosen_avg_rating rejected_avg_rating"
)
REPLY_LABELS = "label kto_tag"
BY_FORMAT = {
    "hh-rlhf": f"prompt {REPLIES}",
    "sharegpt-ranking": f"conversations {REPLIES}",
    "turn-list-pair": f"prompt {REPLIES}",
    "conversational-implicit": f"prompt {REPLIES}",
    "conversational": f"prompt {REPLIES}",
    "standard": f"prompt {REPLIES}",
    "standard-implicit": REPLIES,
    "alpaca-ranking": f"instruction input history {REPLIES}",
    "alpaca": "instruction input history output",
    "messages": "messages conversations",
    "turn-list": "",
    "prompt-reply": "prompt reply completion response output",
    "prompt": "prompt",
    "text": "text",
    "pku-saferlhf": "prompt response_0 response_1 better_response_id safer_response_id",
    "pku-saferlhf-single": "prompt response_0 response_1 better_response_id",
    "helpsteer2-preference": "prompt response_1 response_2 preference_strength",
    "helpsteer3-preference": "context response1 response2 overall_preference domain",
    "helpsteer-ratings": "prompt",
    "shp": "history human_ref_A human_ref_B labels domain",
    "orca-dpo": f"question input status {REPLIES}",
    "open-orca": "system_prompt question response",
    "ultrafeedback-ratings": "instruction chosen_response rejected_response",
    "ultrafeedback": "instruction completions",
    "nectar": "prompt answers",
    "ranking": "prompt instruction question responses completions generations scores ratings ranks",
    "stepwise": "prompt",
    "oasst-trees": "message_tree_id prompt",
    "oasst-messages": "",
}
# Formats of single replies, which may be labelled as good or bad.
SINGLE_REPLIES = ("alpaca", "messages", "turn-list", "prompt-reply", "open-orca")
READ = {
    name: frozenset(f"{columns} {LABELS} {REPLY_LABELS if name in SINGLE_REPLIES else ''}".split())
    for name, columns in BY_FORMAT.items()
}
TEXT_LABELS = ("category", "source")
DIALOGUES = ("prompt", "chosen", "rejected", "reply", "completion", "response", "messages", "conversations", "context")
TURN_KEYS = frozenset({"role", "from", "content", "value", *LOST_PARTS})
PART_KEYS = frozenset({"type", "text", *LOST_PARTS})
NOTHING: tuple[Any, ...] = (None, "", [], {})


def with_columns(records: Sequence[Record], options: ReadOptions, where: str) -> Sequence[Record]:
    """Return records with the fields that ``options.columns`` and ``options.template`` name, and with no others.

    A record that lacks one of the columns keeps its value and has that as its problem.

    Raises:
        DataError: None of the first thousand readable records has a column.
    """
    if not options.columns and options.template is None:
        return records
    columns = [*options.columns.values(), *(template_columns(options.template) if options.template else ())]
    _require_columns(records, columns, where)
    return mapped_records(records, options)


def mapped_records(records: Sequence[Record], options: ReadOptions) -> Sequence[Record]:
    """Return what :func:`with_columns` does for records of a file whose columns are known to exist."""
    if not options.columns and options.template is None:
        return records
    return [record if record.problem else _mapped(record, options) for record in records]


def _require_columns(records: Sequence[Record], columns: Sequence[str], where: str) -> None:
    readable = [record.value for record in records[:PROBE] if not record.problem]
    for column in columns:
        if readable and not any(_has_column(value, column) for value in readable):
            names = sorted({str(name) for value in readable if isinstance(value, dict) for name in value})
            raise DataError(f"{where}: no row has a column {column!r}; the columns are {listed(names)}")


def _has_column(value: Any, column: str) -> bool:
    try:
        _column(value, column)
    except Refusal:
        return False
    return True


def _column(value: Any, column: str) -> Any:
    """Return the value of a column; where no column has the whole name, dots go into objects."""
    if isinstance(value, dict) and column in value:
        return value[column]
    first, dot, rest = column.partition(".")
    if not dot or not isinstance(value, dict) or first not in value:
        raise Refusal(f"there is no column {column!r}")
    return _column(value[first], rest)


def _mapped(record: Record, options: ReadOptions) -> Record:
    try:
        mapped = {field: _column(record.value, column) for field, column in options.columns.items()}
        if options.template is not None:
            names = template_columns(options.template)
            texts = {name: text_of(_column(record.value, name), f"the column {name}") for name in names}
            mapped["prompt"] = _filled(options.template, texts)
    except Refusal as refusal:
        return Record(record.position, record.value, str(refusal))
    return Record(record.position, mapped)


def _filled(template: str, texts: dict[str, str]) -> str:
    """Return the template with its columns filled in; ``str.format`` would take a dot in a name for an attribute."""
    parts = []
    for literal, name, _, _ in string.Formatter().parse(template):
        parts += [literal, texts[name] if name is not None else ""]
    return "".join(parts)


def unused_columns(value: Any, format_name: str) -> list[str]:
    """Return the columns of a record that hold something and are not read.

    A key of the turns in a column is ``prompt[].name``. A category or source that is no text is not read either.
    """
    if not isinstance(value, dict):
        return []
    read = READ[format_name]
    flags = read_flags(value, format_name in SINGLE_REPLIES)
    unused = [str(name) for name in value.keys() - read - flags if value[name] not in NOTHING]
    unused += [name for name in TEXT_LABELS if value.get(name) not in NOTHING and not isinstance(value[name], str)]
    if format_name != "oasst-trees":
        of_turns = {key for name in DIALOGUES if name in read for key in _unused_turn_keys(name, value.get(name))}
        unused += of_turns - flags
    return unused


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


def is_flag(column: str) -> bool:
    """Return whether a column, or the key of a turn, is named as flags of training and ratings are."""
    return key_of(column.rpartition("[].")[2]) in FLAGS


def commonest_unused(unused: Mapping[str, int]) -> dict[str, int]:
    """Return ``LISTED_COLUMNS`` columns at most: flags first, then those that most rows have something in.

    Args:
        unused: By column, how many rows have something there.
    """
    ordered = sorted(unused.items(), key=lambda item: (not is_flag(item[0]), -item[1], item[0]))
    return dict(ordered[:LISTED_COLUMNS])


def unused_summary(unused: Mapping[str, int]) -> dict[str, Any]:
    """Return ``unused``, the commonest columns as JSON has them, and ``unused_columns``, how many if there are more."""
    if len(unused) <= LISTED_COLUMNS:
        return {"unused": dict(unused)}
    return {"unused": commonest_unused(unused), "unused_columns": len(unused)}


def warnings_of(counts: RowCounts) -> list[str]:
    """Return what somebody should look at before training on a source, a sentence each with how many rows it is."""
    flags = [name for name in commonest_unused(counts.unused) if is_flag(name)]
    return [
        *(
            f"{counts.unused[name]}: {name} may say how good a reply is or whether it is to be learned, and is not read"
            for name in flags
        ),
        *(f"{count}: {what}" for what, count in counts.noticed.most_common()),
    ]


def unused_lines(counts: RowCounts) -> list[str]:
    """Return a sentence for each of the commonest columns that are not read, and one for all others."""
    lines = [f"{count}: the column {name} is not read" for name, count in commonest_unused(counts.unused).items()]
    if len(counts.unused) > LISTED_COLUMNS:
        lines.append(f"{len(counts.unused) - LISTED_COLUMNS} further columns are not read")
    return lines
