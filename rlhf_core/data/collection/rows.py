"""Records of a source as typed rows, and the rows of other kinds that are derived from them."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from rlhf_core.config.data import ReadOptions
from rlhf_core.data.readers.detection import (
    first_records,
    format_named,
    format_of,
    is_flag,
    mapped,
    missing_replies,
    other_replies,
    printable,
    recognised,
    record_shape,
    unread_replies,
    unused_columns,
)
from rlhf_core.data.readers.formats import (
    Format,
    LabelledFalse,
    Parsed,
    Undecided,
    is_python_number,
    number_of,
    system_turns,
)
from rlhf_core.data.readers.labels import (
    flag_against,
    is_labelled_false,
    require_replies,
    require_text_only,
    score_columns,
    unread_prompt_parts,
)
from rlhf_core.data.readers.residues import cleaned
from rlhf_core.data.readers.turns import Refusal, Turn, text_of
from rlhf_core.data.row_counts import READABLE, Record, RowCounts, RowFinding
from rlhf_core.data.schema import OF_THE_PROMPT, ROW_TYPES, content_id
from rlhf_core.data.tables import bytes_in_memory, chunked, drained
from rlhf_core.data.text import escaped_controls
from rlhf_core.errors import DataError

MARGIN_EXCERPT = 40
CHUNK_RECORDS = 2048  # of usual length; fewer of long ones, see chunks.CHUNK_BYTES


@dataclass
class FileRows:
    """Rows of a source, or of a part of it, and what became of its other records.

    Attributes:
        counts: What became of all records of the source that are read so far: its parts share them.
        positions: By row, the line or number of its record.
        refused: The records that cannot be used.
        prompt_only: If demonstrations are read, the prompts of records whose reply is not to be
            imitated: rows of prompts with their ``position``.
        label: What the rows call the file, if they have no ``source`` of their own.
    """

    counts: RowCounts
    rows: list[dict[str, Any]] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    refused: list[RowFinding] = field(default_factory=list)
    prompt_only: list[dict[str, Any]] = field(default_factory=list)
    label: str = ""


def read_records(
    records: Iterable[Record], kind: str, source: str, options: ReadOptions | None = None
) -> FileRows:
    """Turn all records of a file into rows of ``kind``, as :func:`row_chunks` does in parts."""
    return joined(row_chunks(records, kind, source, "", source, options or ReadOptions()))


def joined(parts: Iterator[FileRows]) -> FileRows:
    """Return all parts of a source together."""
    whole = next(parts)
    for part in parts:
        whole.rows += part.rows
        whole.positions += part.positions
        whole.refused += part.refused
        whole.prompt_only += part.prompt_only
    return whole


def row_chunks(
    records: Iterable[Record],
    kind: str | None,
    source: str,
    sha256: str,
    where: str,
    options: ReadOptions,
    label: str = "",
) -> Iterator[FileRows]:
    """Yield the rows of a file some thousand records at a time.

    All rows of a record are in one chunk, which has fewer records if they are long. The format is
    that of the first records. Messages of trees are read all together, because those of one tree
    may be anywhere in the file.

    Args:
        kind: One of ``ROW_TYPES``; None for what the file serves as best.
        source: The file's path.
        where: What messages call the file.
        label: What the rows call it, in their column ``source``; by default its path.

    Raises:
        DataError: No known format fits, or several do; or the format holds nothing of this kind; or
            a column or dimension that ``options`` names does not exist.
    """
    remaining = iter(records)
    first = first_records(remaining)
    shape = recognised(first, options, where)
    named = (mapped(record, options) for record in first)
    first_row = next((record.value for record in named if not record.problem), None)
    unread = ""
    if kind is None:
        unread = unread_replies(first, options, shape)
    unread = unread or other_replies(first, options, shape)
    kind = kind or shape.kinds[0]
    _require_kind(shape, kind, options, where, record_shape(first_row))
    remaining = chain(drained(first), remaining)
    of_records = shape
    parts: Iterable[Sequence[Record]]
    if shape.join is None:
        parts = chunked(remaining, CHUNK_RECORDS, lambda record: bytes_in_memory(record.value))
    else:
        parts = [shape.join([mapped(record, options) for record in remaining])]
        of_records = format_named("oasst-trees")
    counts = RowCounts(source, kind, shape.name, sha256)
    for chunk in parts:
        part = FileRows(counts, label=label or source)
        if unread:
            counts.noticed[unread] += len(chunk)
        for record in chunk:
            add_record(part, record, of_records, options)
        yield part


def add_record(part: FileRows, original: Record, shape: Format, options: ReadOptions) -> None:
    """Read a record of format ``shape`` into the rows of a part of its file, or its refusals."""
    counts = part.counts
    noticed: Counter[str] = Counter()
    counts.records += 1
    record = mapped(original, options)
    try:
        _require_format(record, shape, detected=options.format is None)
        rows = _rows(record.value, shape, counts.kind, options, part.label, noticed)
        if counts.kind == "prompts":
            columns = columns_kept(original.value)
            rows = [row | {"columns": columns} for row in rows]
    except Refusal as refusal:
        row = _as_json(original.value)
        finding = RowFinding(
            READABLE, counts.kind, str(refusal), counts.source, record.position, row=row
        )
        part.refused.append(finding)
        counts.refuse(finding)
    except Undecided as undecided:
        counts.dropped[str(undecided)] += 1
        if isinstance(undecided, LabelledFalse) and counts.kind == "demonstrations":
            with suppress(Refusal, Undecided):
                prompts = _rows(record.value, shape, "prompts", options, part.label, Counter())
                part.prompt_only += [row | {"position": record.position} for row in prompts]
    else:
        part.rows += rows
        part.positions += [record.position] * len(rows)
        counts.kept += len(rows)
        counts.expanded += len(rows) - 1
        unused: Iterable[str] = unused_columns(record.value, shape)
        if counts.kind == "prompts":
            # What else the record of a prompt says is kept for reward functions.
            unused = filter(is_flag, unused)
        counts.unused.update(unused)
        prompt = ()
        if rows:
            prompt = rows[0].get("prompt", ())
        for name in unread_prompt_parts(record.value, shape.read, prompt):
            noticed[
                f"{name} may be a part of the prompt, and is not read: name the columns (--column, --template)"
            ] += 1
        counts.noticed.update(noticed)


def columns_kept(value: Any) -> str | None:
    """Return what the record of a prompt says beside it, as JSON for reward functions, or None.

    A date becomes its text. Bytes are left out, and so is what JSON cannot hold, such as a number
    of a million digits.
    """
    if not isinstance(value, dict):
        return None
    columns = {}
    for name, item in value.items():
        if name in OF_THE_PROMPT or item is None or isinstance(item, bytes):
            continue
        with suppress(ValueError, TypeError, RecursionError):
            json.dumps(item, default=str)
            columns[str(name)] = item
    if columns:
        return json.dumps(columns, default=str)
    return None


def _require_kind(
    shape: Format, kind: str, options: ReadOptions, where: str, first_row: str
) -> None:
    file = f"{where} is of format {shape.name}"
    if kind not in shape.kinds:
        note = f" ({shape.note})" if shape.note else ""
        raise DataError(
            f"{file}, which holds no {kind}; it can serve as {', '.join(sorted(shape.kinds))}{note}; "
            f"its first row: {first_row}"
        )
    if options.dimension is not None and options.dimension not in shape.dimensions:
        raise DataError(f"{file}, which has no dimension {options.dimension}; take it out")
    if shape.dimensions and options.dimension is None and kind != "prompts":
        raise DataError(
            f"{file}, which states several preferences; choose one of {', '.join(shape.dimensions)} "
            "(--dimension, or dimension: beside the path in collect.files)"
        )


def _as_json(value: Any) -> str:
    """Return a refused record as the quarantine shows it."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (ValueError, TypeError, RecursionError) as error:
        return json.dumps(f"a {type(value).__name__} that JSON cannot hold: {error}")
    # Half of a surrogate pair cannot be stored as UTF-8, but it should be seen in the quarantine.
    return printable(text)


def _require_format(record: Record, shape: Format, detected: bool) -> None:
    """Refuse a record of another format than the file's.

    Args:
        detected: Whether the format was recognised. Then a record of a richer format would lose its
            further columns.
    """
    if record.problem:
        raise Refusal(record.problem)
    if not shape.matches(record.value):
        if missing := missing_replies(record.value):
            raise Refusal(f"{missing[0]} is missing")
        raise Refusal(
            f"does not match the format {shape.name} of the file: expected {shape.example}"
        )
    other = format_of(record.value) if detected else None
    if other is not None and other is not shape:
        raise Refusal(
            f"is of format {other.name}, the file of format {shape.name}: expected {shape.example}"
        )


def _rows(
    value: Any, shape: Format, kind: str, options: ReadOptions, source: str, noticed: Counter[str]
) -> list[dict[str, Any]]:
    """Return the rows of one record; :class:`Refusal` and :class:`Undecided` are about all of them.

    Args:
        source: What the rows call their file.
        noticed: Counts what was noticed about rows that stay.
    """
    labels = value if isinstance(value, dict) else {}
    require_text_only(value)
    if kind != "prompts" and (flag := flag_against(value, shape.is_single)):
        raise LabelledFalse(f"{flag} says that the row is not to be learned")
    system = system_turns(labels)
    parts = shape.parse(value, kind, options)
    if isinstance(parts, Parsed):
        parts = [parts]
    rows = []
    for parsed in parts:
        if parsed.prompt is not None and system:
            parsed = replace(parsed, prompt=[*system, *parsed.prompt])
        if parsed.chosen is not None and parsed.rejected is not None:
            require_replies(value, shape.read, parsed.chosen, parsed.rejected)
        without_residues = cleaned(parsed, noticed, bool(options.columns))
        row = _content(without_residues, kind, labels)
        if kind == "preferences":
            if parsed.margin is not None:
                row["margin"] = parsed.margin
            else:
                row["margin"] = _margin(labels)
        elif kind != "prompts" and parsed.chosen is not None and parsed.margin is None:
            # The chosen reply is imitated only if nothing says that the other one is better.
            with suppress(Undecided):
                _margin(labels)
        origin = labels.get("source")
        category = options.category or labels.get("category") or parsed.category or origin
        row |= {"source": escaped_controls(source), "category": "general"}
        if isinstance(origin, str) and origin:
            row["source"] = text_of(origin, "source")
        if isinstance(category, str) and category:
            row["category"] = text_of(category, "category")
        row["id"] = content_id(kind, row)
        if parsed.prompt is not None:
            row["group"] = prompt_group(parsed.prompt)
        else:
            row["group"] = row["id"]
        rows.append(row)
    return rows


def _content(parsed: Parsed, kind: str, labels: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content columns of a row of ``kind``; :class:`Refusal` names what is missing."""
    is_imitated = parsed.reply is not None and kind in ("demonstrations", "pretrain")
    if is_imitated and is_labelled_false(labels):
        raise LabelledFalse("the reply is labelled false: nothing to imitate")
    if kind == "pretrain":
        if parsed.text is not None:
            return {"text": parsed.text}
        return {"text": dialogue_text(parsed.prompt or [], _reply(parsed))}
    if parsed.prompt is None:
        raise Refusal("there is no prompt")
    if kind == "prompts":
        return {"prompt": parsed.prompt}
    if kind == "demonstrations":
        return {"prompt": parsed.prompt, "reply": _reply(parsed)}
    if parsed.chosen is None or parsed.rejected is None:
        raise Refusal("there is no pair of replies")
    return {"prompt": parsed.prompt, "chosen": parsed.chosen, "rejected": parsed.rejected}


def _reply(parsed: Parsed) -> str:
    reply = parsed.chosen
    if parsed.reply is not None:
        reply = parsed.reply
    if reply is None:
        raise Refusal("the dialogue ends with the user's turn: there is no reply")
    return reply


def _margin(labels: Mapping[str, Any]) -> float | None:
    """Return the column ``margin``, or the difference of the scores of the two replies.

    Raises:
        Refusal: Either says that the rejected reply is the better one.
        Undecided: Either says that no reply is better.
    """
    # Clean files of a run have the column preference_margin.
    value = labels.get("margin", labels.get("preference_margin"))
    if value is None or value == "":
        return _score_gap(labels)
    try:
        if is_python_number(value):
            raise TypeError
        margin = float(value)
    except OverflowError:
        raise Refusal("the margin is not a finite number") from None
    except (TypeError, ValueError):
        raise Refusal(f"margin {str(value)[:MARGIN_EXCERPT]!r} is not a number") from None
    if margin == 0:
        raise Undecided("the margin is 0: neither reply is preferred")
    if math.isfinite(margin) and margin < 0:
        raise Refusal(f"the margin prefers the other reply: it is {margin:g}")
    # If the scores are equal, the margin says which reply is better.
    with suppress(Undecided):
        _score_gap(labels)
    return margin


def _score_gap(labels: Mapping[str, Any]) -> float | None:
    for names in score_columns(tuple(labels)):
        if any(labels[name] in (None, "") for name in names):
            continue
        chosen, rejected = (number_of(labels[name], name) for name in names)
        are_ranks = "rank" in names[0].casefold()
        if chosen == rejected:
            raise Undecided("both replies have the same score")
        if (chosen < rejected) != are_ranks:
            raise Refusal(
                f"the scores prefer the other reply: {names[0]} is {chosen:g}, {names[1]} is {rejected:g}"
            )
        return None if are_ranks else chosen - rejected
    return None


def prompt_group(prompt: Sequence[Turn]) -> str:
    """Return the key that rows are split by: the prompt's turns without their case and spacing.

    System turns do not count: under another system prompt, the same question stays the same.
    """
    turns = texts_of_turns(prompt)
    return " | ".join(map(casefolded, turns))


def texts_of_turns(prompt: Sequence[Turn]) -> list[str]:
    """Return the texts of a prompt's turns, without system turns."""
    return [turn["content"] for turn in prompt if turn["role"] != "system"]


def casefolded(text: str) -> str:
    """Return a text as it is compared: without its case and spacing."""
    words = text.casefold().split()
    return " ".join(words)


def dialogue_text(prompt: Sequence[Turn], reply: str) -> str:
    """Return a dialogue as plain text for pretraining: its turns, one paragraph each."""
    texts = [turn["content"] for turn in prompt]
    return "\n".join([*texts, reply])


# In the order of ROW_TYPES every kind comes after those that it is derived from.
DERIVED_FROM = {
    "demonstrations": ("preferences",),
    "prompts": ("preferences", "demonstrations"),
    "pretrain": ("demonstrations",),
}
LABELS = ("category", "source", "group", "path", "position")


def derived_from(given: Collection[str], also: Collection[str] = ()) -> dict[str, str]:
    """Return by kind what it is derived from; empty if it is ``given`` or nothing gives it.

    Kinds in ``also`` are derived although they are given.

    Demonstrations come from chosen replies, prompts from all prompts, pretraining text from
    demonstrations. Preferences are derived from nothing. A kind that was given but has no usable
    row stays empty, which the data gate reports.
    """
    derived = dict.fromkeys(ROW_TYPES, "")
    for kind, sources in DERIVED_FROM.items():
        if kind in also or kind not in given:
            parents = [parent for parent in sources if parent in given or derived[parent]]
            derived[kind] = ", ".join(parents)
    return derived


def derive(
    kind: str,
    parents: Sequence[Mapping[str, Any]],
    seen: set[str],
    passed: Sequence[bool] | None = None,
) -> list[dict[str, Any]]:
    """Return the distinct rows of ``kind`` that come from ``parents``, with ids.

    Of equal rows the first is kept. Each has the labels of its parent, and its file and line if
    these are given. A ranking gives several pairs, the best first, but only its best reply is
    imitated: the one that the first pair to a prompt prefers.

    Args:
        parents: Rows. If one of a record's rows is there, all of them are.
        seen: Ids of rows that were derived before; those of the new rows are added.
        passed: By parent, whether rows come from it. The others still tell which reply of a record
            is the best.
    """
    kept: dict[str, dict[str, Any]] = {}
    best: dict[tuple[Any, ...], str] = {}
    for number, parent in enumerate(parents):
        if kind == "demonstrations" and "path" in parent:
            turns = ((turn["role"], turn["content"]) for turn in parent["prompt"] or [])
            # The same for all pairs of a record to one prompt.
            asked = (parent["path"], parent["position"], *turns)
            if best.setdefault(asked, parent["chosen"]) != parent["chosen"]:
                continue
        if passed is not None and not passed[number]:
            continue
        row = {name: parent[name] for name in LABELS if name in parent}
        if kind == "demonstrations":
            row |= {"prompt": parent["prompt"], "reply": parent["chosen"]}
        elif kind == "prompts":
            row |= {"prompt": parent["prompt"]}
        else:
            row |= {"text": dialogue_text(parent["prompt"], parent["reply"])}
        key = content_id(kind, row)
        if key not in seen:
            kept.setdefault(key, row | {"id": key})
    seen.update(kept)
    return list(kept.values())


def whole_records(parts: Iterable[list[dict[str, Any]]]) -> Iterator[list[dict[str, Any]]]:
    """Yield rows in other parts, each of which has all rows of its records.

    Args:
        parts: Rows in order, with the ``path`` and ``position`` of their records; without these,
            each row is a record of its own.
    """
    waiting: list[dict[str, Any]] = []
    for part in parts:
        waiting += part
        end = len(waiting)
        if waiting and "position" in waiting[-1]:
            places = [(row["path"], row["position"]) for row in waiting]
            while end and places[end - 1] == places[-1]:
                end -= 1
        if end:
            yield waiting[:end]
            waiting = waiting[end:]
    if waiting:
        yield waiting
