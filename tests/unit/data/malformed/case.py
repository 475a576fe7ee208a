"""A malformed or odd file, and what must become of every row of it."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_core.data.readers.stream import KINDS

Row = dict[str, Any]


@dataclass(frozen=True)
class RowsRead:
    """The file is read.

    Attributes:
        kept: Rows that the reader gives; ``written + expanded`` less those refused and dropped.
        refused: Rows that the reader refuses, by a part of the reason.
        dropped: Rows without a fault that prefer no reply, by a part of the reason.
        expanded: Rows beyond the first that one record gives.
        unused: Columns that are not read, which the manifest notes.
        quarantined: Rows that the reader gives and validation refuses, by a part of the reason.
    """

    kept: int
    refused: Mapping[str, int] = field(default_factory=dict)
    dropped: Mapping[str, int] = field(default_factory=dict)
    expanded: int = 0
    unused: Sequence[str] = ()
    quarantined: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class OddFile:
    """One file of the corpus.

    Attributes:
        label: What the test is called; the file is named after it where ``name`` is only a suffix.
        name: The file's name, or its suffix.
        content: The file's bytes, or a function that makes something at the path.
        written: How many rows somebody wrote to it.
        expected: What must become of them; of a file that is refused whole, a part of the error.
        kind: The kind of rows that it is read as.
        options: The options of its source.
    """

    label: str
    name: str
    content: bytes | Callable[[Path], None]
    written: int
    expected: str | RowsRead
    kind: str = "preferences"
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def file(self) -> str:
        """The path of the file in the folder of the corpus."""
        suffixes = (*KINDS, ".JSONL")
        return (
            f"{self.label}{self.name}"
            if self.name.startswith(suffixes)
            else f"{self.label}/{self.name}"
        )

    def write(self, folder: Path) -> None:
        """Make the file below ``folder``."""
        path = folder / self.file
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(self.content, bytes):
            path.write_bytes(self.content)
        else:
            self.content(path)


def quarantined(kept: int, reason: str) -> RowsRead:
    """Return what becomes of a file with one row that the reader gives and validation refuses."""
    return RowsRead(kept, quarantined={reason: 1})


def pairs(label: str, count: int = 2) -> list[Row]:
    """Return ``count`` good pairs that occur in no other file."""
    return [
        {"prompt": f"{label} {n}?", "chosen": f"good {label} {n}", "rejected": f"bad {label} {n}"}
        for n in range(count)
    ]


def jsonl(label: str, rows: Sequence[Any], expected: str | RowsRead, **more: Any) -> OddFile:
    """Return a file of JSON lines."""
    return OddFile(label, ".jsonl", lines(*rows), len(rows), expected, **more)


def pair(label: str, **changes: Any) -> Row:
    """Return one pair that occurs in no other file, with other values or further ones."""
    return {
        "prompt": f"{label} x?",
        "chosen": f"good {label} x",
        "rejected": f"bad {label} x",
    } | changes


def lines(*rows: Any) -> bytes:
    """Return rows as JSON lines; a row given as bytes or text is a line as it is."""
    parts = [
        row
        if isinstance(row, bytes)
        else (row if isinstance(row, str) else json.dumps(row)).encode()
        for row in rows
    ]
    return b"\n".join(parts) + b"\n"


def table_text(rows: Sequence[Row], delimiter: str = ",") -> bytes:
    """Return rows as CSV with a header."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def parquet(table: pa.Table | Sequence[Row], **options: Any) -> bytes:
    """Return a table, or rows, as a parquet file."""
    buffer = pa.BufferOutputStream()
    pq.write_table(
        table if isinstance(table, pa.Table) else pa.Table.from_pylist(list(table)),
        buffer,
        **options,
    )
    return buffer.getvalue().to_pybytes()


def arrow(table: pa.Table | Sequence[Row], stream: bool = False, batch: int | None = None) -> bytes:
    """Return a table, or rows, as an Arrow file or stream."""
    table = table if isinstance(table, pa.Table) else pa.Table.from_pylist(list(table))
    buffer = pa.BufferOutputStream()
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(buffer, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch)
    return buffer.getvalue().to_pybytes()
