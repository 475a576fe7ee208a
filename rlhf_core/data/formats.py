"""Read any known file or hub id as rows of a kind; refused records are returned with their reasons."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlhf_core.config.collect import DataSource
from rlhf_core.data.hub import PREFIX, load_hub_records
from rlhf_core.data.readers.containers import Record, load_records
from rlhf_core.data.readers.shapes import FORMATS, Format, Parsed
from rlhf_core.data.readers.turns import Refusal, Turn, text_of
from rlhf_core.data.schema import content_id
from rlhf_core.errors import DataError
from rlhf_core.file_patterns import expand, spelled
from rlhf_core.files import sha256_file

# The format of a file is that of this share of the records that have one, among the first so many.
PROBE = 1000
MAJORITY = 0.9
MARGIN_EXCERPT = 40


@dataclass
class FileRows:
    """Rows of one source file, by the positions of their records.

    ``refused`` has ``{source, position, reason, row}``, the row as JSON text.
    ``records`` is the number of rows, refused rows and rows that were ``cut`` by a limit; ``unread`` rows of a hub data
    set come on top.
    """

    source: str
    format: str
    sha256: str
    records: int
    rows: list[dict[str, Any]] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    refused: list[dict[str, Any]] = field(default_factory=list)
    cut: int = 0
    unread: int = 0


@dataclass(frozen=True)
class SourceFile:
    """A file or hub id (``path`` is None) to read, and the format that params.yaml names for it.

    ``name`` is the path as params.yaml spells it: files of one name in two folders have different ones.
    """

    name: str
    path: Path | None
    format: str | None = None


def source_files(sources: Sequence[str | DataSource], base: Path) -> list[SourceFile]:
    """Return every file and hub id of ``sources`` once, in the order in which they are first named.

    Raises:
        DataError: A source matches no file, or a file is named with two formats.
    """
    files: dict[str, SourceFile] = {}
    for given in sources:
        source = DataSource(path=given) if isinstance(given, str) else given
        paths = [None] if source.path.startswith(PREFIX) else expand(source.path, base, "correct it in collect.files")
        for path in paths:
            key = str(path.resolve()) if path else source.path
            name = spelled(path, source.path, base) if path else source.path
            known = files.setdefault(key, SourceFile(name, path, source.format))
            if known.format and source.format not in (None, known.format):
                raise DataError(
                    f"{known.name} is named with the formats {known.format} and {source.format}; take one of them out "
                    "of collect.files"
                )
            files[key] = replace(known, format=known.format or source.format)
    return list(files.values())


def read_sources(
    sources: Sequence[str | DataSource], kind: str, base: Path, limit: int | None = None
) -> Iterator[FileRows]:
    """Read every file or hub id of ``sources`` as rows of ``kind``; ``limit`` bounds the rows taken from the hub."""
    for file in source_files(sources, base):
        yield read_source(file, kind, limit)


def read_source(file: SourceFile, kind: str, limit: int | None = None) -> FileRows:
    """Read one file or hub id as rows of ``kind``; see :func:`read_sources`."""
    if file.path is not None:
        records = load_records(file.path)
        return read_records(records, kind, file.name, sha256_file(file.path), str(file.path), file.format)
    records, total = load_hub_records(file.name, limit)
    result = read_records(records, kind, file.name, "", format_name=file.format)
    result.unread = total - len(records)
    return result


def cut_to_limit(files: Sequence[FileRows], limit: int | None) -> None:
    """Cut the rows of ``files`` to ``limit`` in all: every file keeps its first rows, up to its fair share."""
    for file, share in zip(files, fair_shares([len(file.rows) for file in files], limit), strict=True):
        file.cut = len(file.rows) - share
        del file.rows[share:], file.positions[share:]


def fair_shares(sizes: Sequence[int], limit: int | None) -> list[int]:
    """Return how many of ``limit`` each source gives: the same number, or all it has where that is less."""
    if limit is None:
        return list(sizes)
    shares = [0] * len(sizes)
    left = min(limit, sum(sizes))
    while left:
        unfilled = [i for i, size in enumerate(sizes) if shares[i] < size]
        each = max(left // len(unfilled), 1)
        for i in unfilled:
            more = min(each, sizes[i] - shares[i], left)
            shares[i] += more
            left -= more
    return shares


def read_records(
    records: Sequence[Record],
    kind: str,
    source: str,
    sha256: str,
    where: str = "",
    format_name: str | None = None,
) -> FileRows:
    """Turn records into rows of ``kind``.

    Args:
        records: The records of one file.
        kind: One of ``ROW_TYPES``.
        source: The file's path, which becomes part of the rows.
        sha256: The file's hash.
        where: What messages call the file; by default ``source``.
        format_name: The format of the records, which is otherwise detected.

    Raises:
        DataError: No known format fits, or several do, or the format carries nothing of this kind.
    """
    where = where or source
    shape = format_named(format_name) if format_name else detect(records, where)
    if kind not in shape.carries:
        raise DataError(
            f"{where} is of format {shape.name}, which holds no {kind}; "
            f"it can serve as {', '.join(sorted(shape.carries))}"
        )
    result = FileRows(source, shape.name, sha256, len(records))
    for record in records:
        try:
            _require_format(record, shape, detected=format_name is None)
            result.rows.append(_row(record, shape, kind, source))
            result.positions.append(record.position)
        except Refusal as refusal:
            refused = {"source": source, "position": record.position, "reason": str(refusal)}
            result.refused.append(refused | {"row": _as_json(record.value)})
    return result


def _as_json(value: Any) -> str:
    """Return a refused record as the quarantine shows it."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (ValueError, TypeError, RecursionError) as error:
        return json.dumps(f"a {type(value).__name__} that JSON cannot hold: {error}")
    # Half of a surrogate pair cannot be stored as UTF-8, but the reader of the quarantine should see it.
    return text.encode("utf-8", "backslashreplace").decode()


def detect(records: Sequence[Record], where: str) -> Format:
    """Return the format of nearly all of the first thousand records that have one.

    Raises:
        DataError: None of them is of a known format (the message lists those), or too many are of another.
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
    known = "\n".join(f"  {shape.name}: {shape.example}" for shape in FORMATS)
    if not readable:
        problem = records[0].problem if records else "there are no rows"
        raise DataError(f"{where}, row {records[0].position if records else 0}: {problem}; known formats:\n{known}")
    first = readable[0]
    record_shape = (
        f"keys {', '.join(map(str, first.value))}" if isinstance(first.value, dict) else type(first.value).__name__
    )
    raise DataError(f"{where}, row {first.position} ({record_shape}) is of no known format; known formats:\n{known}")


def format_of(value: Any) -> Format | None:
    """Return the format of a record: the first that it matches."""
    return next((shape for shape in FORMATS if shape.matches(value)), None)


def format_named(name: str) -> Format:
    """Return the format of that name."""
    return next(shape for shape in FORMATS if shape.name == name)


def _require_format(record: Record, shape: Format, detected: bool) -> None:
    """Refuse a record of another format; one that has more than a ``detected`` format holds would lose that."""
    if record.problem:
        raise Refusal(record.problem)
    if not shape.matches(record.value):
        raise Refusal(f"does not match the format {shape.name} of the file: expected {shape.example}")
    other = format_of(record.value)
    if detected and other is not None and other is not shape:
        raise Refusal(f"is of format {other.name}, the file of format {shape.name}: expected {shape.example}")


def _row(record: Record, shape: Format, kind: str, source: str) -> dict[str, Any]:
    parsed = shape.parse(record.value)
    labels = record.value if isinstance(record.value, dict) else {}
    row: dict[str, Any] = _content(parsed, kind, labels)
    if kind == "preferences":
        row["margin"] = _margin(labels.get("margin"))
    origin = labels.get("source")
    row["source"] = text_of(origin, "source") if isinstance(origin, str) and origin else source
    category = labels.get("category") or origin
    row["category"] = text_of(category, "category") if isinstance(category, str) and category else "general"
    row["id"] = content_id(kind, row)
    row["group"] = prompt_group(parsed.prompt) if parsed.prompt is not None else row["id"]
    return row


def _content(parsed: Parsed, kind: str, labels: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content columns of a row of ``kind``; :class:`Refusal` names what is missing."""
    if parsed.reply is not None and kind in ("demonstrations", "pretrain") and _is_labelled_false(labels):
        raise Refusal(
            "the reply is labelled false: nothing to imitate (its prompt can be used under collect.files.prompts)"
        )
    if kind == "pretrain":
        return {"text": parsed.text if parsed.text is not None else dialogue_text(parsed.prompt or [], _reply(parsed))}
    if parsed.prompt is None:
        raise Refusal("there is no prompt")
    if kind == "prompts":
        return {"prompt": parsed.prompt}
    if kind == "demonstrations":
        return {"prompt": parsed.prompt, "reply": _reply(parsed)}
    if parsed.chosen is None or parsed.rejected is None:
        raise Refusal("there is no pair of replies")
    return {"prompt": parsed.prompt, "chosen": parsed.chosen, "rejected": parsed.rejected}


def _is_labelled_false(labels: Mapping[str, Any]) -> bool:
    """Whether an unpaired reply is labelled as a bad one (KTO: TRL's ``label``, LLaMA-Factory's ``kto_tag``)."""
    given = [labels.get(name) for name in ("label", "kto_tag")]
    return any(
        value.lower() in ("false", "0") if isinstance(value, str) else isinstance(value, int | float) and value == 0
        for value in given
    )


def _reply(parsed: Parsed) -> str:
    reply = parsed.reply if parsed.reply is not None else parsed.chosen
    if reply is None:
        raise Refusal("the dialogue ends with the user's turn: there is no reply")
    return reply


def _margin(value: Any) -> float | None:
    if value is None or value == "":
        return None
    try:
        if isinstance(value, bool):
            raise TypeError
        return float(value)
    except OverflowError:
        raise Refusal("the margin is not a finite number") from None
    except (TypeError, ValueError):
        raise Refusal(f"margin {str(value)[:MARGIN_EXCERPT]!r} is not a number") from None


def prompt_group(prompt: Sequence[Turn]) -> str:
    """Return the key that rows are split by: the prompt's turns, casefolded, with whitespace collapsed.

    System turns do not count: the same question under another system prompt is the same question.
    """
    turns = (turn["content"] for turn in prompt if turn["role"] != "system")
    return " | ".join(" ".join(turn.casefold().split()) for turn in turns)


def dialogue_text(prompt: Sequence[Turn], reply: str) -> str:
    """Return a dialogue as plain text for pretraining: its turns, one paragraph each."""
    return "\n".join([*(turn["content"] for turn in prompt), reply])
