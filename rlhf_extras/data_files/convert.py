"""Write the rows of data files in the conversational format, each checked to be read back as it
was.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa

from rlhf_core.config.data import DataSource, ReadOptions
from rlhf_core.config.formats import FormatName
from rlhf_core.data.collection.rows import FileRows, add_record
from rlhf_core.data.collection.sources import source_chunks, source_files
from rlhf_core.data.readers.detection import format_of
from rlhf_core.data.row_counts import READABLE, Record, RowCounts, RowFinding
from rlhf_core.data.schema import CONTENT_FIELDS, MESSAGES, REPLIES
from rlhf_core.data.tables import TableWriter, bytes_in_memory, chunked
from rlhf_core.errors import DataError, RlhfError
from rlhf_core.storage.files import fsync_path, scratch_folder, unwritable
from rlhf_extras.data_files.describe import outcome_lines

BATCH = 1000
LABELS = ("category", "source")
REFUSED_SUFFIX = ".refused.jsonl"
FORMATS: dict[str, FormatName] = {
    "preferences": "conversational",
    "demonstrations": "messages",
    "prompts": "prompt",
    "pretrain": "text",
}
LABEL_COLUMNS = [(name, pa.string()) for name in LABELS]
SCHEMAS = {
    "preferences": pa.schema(
        [
            ("prompt", MESSAGES),
            ("chosen", MESSAGES),
            ("rejected", MESSAGES),
            ("margin", pa.float64()),
            *LABEL_COLUMNS,
        ]
    ),
    "demonstrations": pa.schema([("messages", MESSAGES), *LABEL_COLUMNS]),
    "prompts": pa.schema([("prompt", MESSAGES), *LABEL_COLUMNS]),
    "pretrain": pa.schema([("text", pa.string()), *LABEL_COLUMNS]),
}


@dataclass(frozen=True)
class Conversion:
    """What was written where; ``refused_file`` is None if no row was refused."""

    rows: int
    kind: str
    output: str
    refused_file: str | None
    files: Sequence[RowCounts]

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        files = []
        for file in self.files:
            reasons = {count.reason: count.rows for count in file.reasons.commonest()}
            about = {
                "source": file.source,
                "format": file.format,
                "records": file.records,
                "expanded": file.expanded,
                "refused": file.refused,
                "rows": file.kept,
                "dropped": dict(file.dropped),
                "reasons": reasons,
            }
            files.append(about)
        return vars(self) | {"files": files}


def refused_file_of(output: Path) -> Path:
    """Return the file of refused rows beside a converted one: ``pairs.refused.jsonl`` beside
    ``pairs.jsonl``.
    """
    return output.with_name(output.stem + REFUSED_SUFFIX)


def record_of(kind: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row as a record of the conversational format, with its labels.

    Preferences are TRL's ``prompt``, ``chosen`` and ``rejected`` as lists of messages,
    demonstrations ``messages``, prompts ``prompt``, pretraining texts ``text``. A margin that is
    not known is left out, and so is what the record of a prompt says beside it.
    """
    replies = {name: [{"role": "assistant", "content": row[name]}] for name in REPLIES[kind]}
    content = {name: replies.get(name, row[name]) for name in CONTENT_FIELDS[kind]}
    if kind == "demonstrations":
        content = {"messages": [*row["prompt"], *replies["reply"]]}
    if row.get("margin") is not None:
        content["margin"] = row["margin"]
    return content | {name: row[name] for name in LABELS}


def convert(sources: Sequence[DataSource], base: Path, kind: str, output: Path) -> Conversion:
    """Write the rows of ``sources`` as ``kind`` to ``output``, and refused rows to a file beside
    it, part by part.

    Reading ``output`` gives the same rows: content, labels and ids. That is tried with every row
    before it is written; one that would be read differently is refused. Both files appear when all
    is written, or not at all.

    ``output`` ends with .jsonl or .parquet. An existing file is replaced, one of refused rows
    beside it replaced or removed.

    Raises:
        DataError: A source cannot be read or holds no such rows, or no row can be used.
        RlhfError: The folder cannot be written to, or one of the two files is one of the sources.
    """
    inputs = source_files(sources, base)
    refused_file = refused_file_of(output)
    read = {file.path.resolve() for file in inputs if file.path is not None}
    for written in (output, refused_file):
        if written.resolve() in read:
            raise RlhfError(
                f"{written} is one of the files that are read; choose another name for {output}"
            )
    files: list[RowCounts] = []
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        # In the same folder, so that files can be renamed into their places.
        with scratch_folder(f".{output.name}.", output.parent) as folder:
            rows, refused = folder / "rows", folder / "refused"
            with refused.open("w", encoding="utf-8") as stream:

                def records() -> Iterator[dict[str, Any]]:
                    for file in inputs:
                        for part in source_chunks(file, kind):
                            yield from _converted(part, files, stream)

                _write(rows, kind, records(), is_parquet=output.suffix == ".parquet")
            if not any(file.kept for file in files):
                reasons: Counter[str] = Counter()
                for file in files:
                    reasons.update({count.reason: count.rows for count in file.reasons.values()})
                commonest = f" (most often: {reasons.most_common(1)[0][0]})" if reasons else ""
                raise DataError(
                    f"no row can be written to {output}{commonest}; rlhf data inspect shows how the files are read"
                )
            is_refused = any(file.refused for file in files)
            if is_refused:
                os.replace(refused, refused_file)
            else:
                refused_file.unlink(missing_ok=True)  # of an earlier conversion
            os.replace(rows, output)
    except OSError as error:
        raise unwritable(output, error) from error
    kept = sum(file.kept for file in files)
    return Conversion(kept, kind, str(output), str(refused_file) if is_refused else None, files)


def _converted(part: FileRows, files: list[RowCounts], refused: TextIO) -> Iterator[dict[str, Any]]:
    """Yield the records of a part of a file, whose counts are added to ``files`` with the first;
    refused rows go to ``refused``.
    """
    if not files or files[-1] is not part.counts:
        files.append(part.counts)
    file, kind = part.counts, part.counts.kind
    findings = part.refused
    for row, position in zip(part.rows, part.positions, strict=True):
        record = record_of(kind, row)
        if reason := _difference(record, row, kind):
            text = json.dumps(record, ensure_ascii=False)
            findings.append(RowFinding(READABLE, kind, reason, file.source, position, row=text))
            file.refuse(findings[-1], was_kept=True)
        else:
            yield record
    for finding in findings:
        entry = {name: getattr(finding, name) for name in ("source", "position", "reason", "row")}
        refused.write(json.dumps(entry, ensure_ascii=False) + "\n")


def _difference(record: Mapping[str, Any], row: Mapping[str, Any], kind: str) -> str:
    """Return why ``record`` would not be read as ``row``; empty if it would."""
    if not math.isfinite(record.get("margin", 0.0)):
        return "the margin is not a finite number, which JSON cannot hold"
    if kind == "pretrain" and row["group"] != row["id"]:
        return (
            "is made of a dialogue, whose prompt decides on its split; convert it as demonstrations"
        )
    shape = format_of(record)
    if shape is None or shape.name != FORMATS[kind]:
        return f"would be read as format {shape.name if shape else 'unknown'}"
    read = FileRows(RowCounts("", kind, shape.name))
    add_record(read, Record(1, record), shape, ReadOptions(format=FORMATS[kind]))
    if read.refused:
        return f"would be refused: {read.refused[0].reason}"
    said = []
    for each in (*read.rows, row):
        said.append({name: value for name, value in each.items() if name != "columns"})
    if len(said) == 2 and said[0] == said[1]:
        return ""
    return "would be read differently"


def _write(path: Path, kind: str, records: Iterable[dict[str, Any]], is_parquet: bool) -> None:
    """Write records as lines or, so that only some of them are in memory as columns, in row
    groups.
    """
    if is_parquet:
        with TableWriter(path, SCHEMAS[kind]) as writer:
            for batch in chunked(records, BATCH, bytes_in_memory):
                writer.write(pa.Table.from_pylist(batch, schema=SCHEMAS[kind]))
    else:
        with path.open("w", encoding="utf-8") as stream:
            stream.writelines(
                json.dumps(r, ensure_ascii=False, allow_nan=False) + "\n" for r in records
            )
    fsync_path(path)


def as_text(conversion: Conversion, width: int = 80) -> str:
    """Return a block of lines per file, and where rows and refused rows are."""
    blocks = []
    for file in conversion.files:
        lines = [
            file.source,
            f"  read     {file.records} ({file.format})",
            f"  written  {file.kept}{' (some give several)' if file.expanded else ''}",
            *outcome_lines(file, width),
        ]
        blocks.append("\n".join(lines))
    ending = f"{conversion.rows} {conversion.kind} are in {conversion.output}"
    if conversion.refused_file:
        ending += f"\nrefused rows are in {conversion.refused_file}"
    return "\n\n".join([*blocks, ending])
