"""Rows that do not enter training, each with all its reasons; no row is dropped silently."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from rlhf_core.data.row_counts import RowFinding
from rlhf_core.data.schema import write_table
from rlhf_core.data.tables.table_stream import TableWriter, table_chunks
from rlhf_core.data.validation.provenance import Origins

REFUSED_SCHEMA = pa.schema(
    [
        ("kind", pa.string()),
        ("source", pa.string()),
        ("position", pa.int64()),
        ("reason", pa.string()),
        ("row", pa.string()),
    ]
)
QUARANTINE_SCHEMA = pa.schema(
    [
        ("kind", pa.string()),
        ("id", pa.string()),
        ("source", pa.string()),
        ("position", pa.int64()),
        ("reasons", pa.list_(pa.string())),
        ("row", pa.string()),
    ]
)


@dataclass(frozen=True)
class Quarantined:
    """One refused row: kind, id (``FILE:POSITION`` where it never became a row), reasons, and content as JSON.

    ``source`` and ``position`` are the file and line that it was read from, None for rows of no file.
    """

    kind: str
    id: str
    reasons: list[str]
    row: str
    source: str | None = None
    position: int | None = None


def refused_table(refused: Sequence[RowFinding]) -> pa.Table:
    """Return rows that readers refused as they are stored."""
    return pa.Table.from_pylist([vars(row) for row in refused], schema=REFUSED_SCHEMA)


def write_refused(path: Path, refused: Sequence[RowFinding]) -> None:
    """Write the rows that readers refused."""
    write_table(path, refused_table(refused))


def read_refused(path: Path) -> Iterator[list[Quarantined]]:
    """Yield the rows that readers refused in parts, as quarantined rows; a missing file means that there are none."""
    for table in table_chunks(path) if path.exists() else ():
        yield [
            Quarantined(
                row["kind"],
                f"{row['source']}:{row['position']}",
                [row["reason"]],
                row["row"],
                row["source"],
                row["position"],
            )
            for row in table.to_pylist()
        ]


def count_refused(path: Path) -> Counter[str]:
    """Return how many rows of each kind readers refused."""
    chunks = table_chunks(path, ["kind"]) if path.exists() else ()
    return Counter(kind for table in chunks for kind in table.column("kind").to_pylist())


def quarantine_rows(
    kind: str, table: pa.Table, numbers: Sequence[int], reasons: Mapping[int, Sequence[str]], origins: Origins | None
) -> list[Quarantined]:
    """Return rows of a kind with their reasons and where they come from.

    Args:
        table: The rows to return.
        numbers: Their numbers among all rows of the kind.
        reasons: By number of a row, why it is refused.
        origins: Those of all rows of the kind; None for rows of no file.
    """
    quarantined = []
    for number, row in zip(numbers, table.to_pylist(), strict=True):
        text = json.dumps(row, ensure_ascii=False, default=str)
        origin = vars(origins[number]) if origins is not None else {}
        quarantined.append(Quarantined(kind, str(row.get("id")), list(reasons[number]), text, **origin))
    return quarantined


def write_quarantine(path: Path, parts: Iterable[Sequence[Quarantined]]) -> None:
    """Write ``data/quarantine.parquet`` (see :class:`Quarantined`); an empty file when nothing was refused."""
    with TableWriter(path, QUARANTINE_SCHEMA) as writer:
        for rows in parts:
            writer.write(pa.Table.from_pylist([vars(row) for row in rows], schema=QUARANTINE_SCHEMA))
