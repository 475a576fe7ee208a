"""Rows that do not enter training, each with all its reasons; no row is dropped silently."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from rlhf_core.data.schema import read_table, write_table
from rlhf_core.data.validation.provenance import Origin

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


def write_refused(path: Path, refused: Sequence[Mapping[str, Any]]) -> None:
    """Write the rows that readers refused (``kind, source, position, reason, row``)."""
    write_table(path, pa.Table.from_pylist([dict(row) for row in refused], schema=REFUSED_SCHEMA))


def read_refused(path: Path) -> list[Quarantined]:
    """Read the rows that readers refused, as quarantined rows; a missing file means that there are none."""
    if not path.exists():
        return []
    return [
        Quarantined(
            row["kind"],
            f"{row['source']}:{row['position']}",
            [row["reason"]],
            row["row"],
            row["source"],
            row["position"],
        )
        for row in read_table(path).to_pylist()
    ]


def quarantine_rows(
    kind: str, table: pa.Table, reasons: Mapping[int, Sequence[str]], origins: Sequence[Origin]
) -> list[Quarantined]:
    """Return the rows of ``table`` at the numbers in ``reasons``, with their reasons and where they come from.

    ``origins`` are those of all rows of the table, or none.
    """
    numbers = sorted(reasons)
    quarantined = []
    for number, row in zip(numbers, table.take(pa.array(numbers, pa.int64())).to_pylist(), strict=True):
        text = json.dumps(row, ensure_ascii=False, default=str)
        origin = vars(origins[number]) if origins else {}
        quarantined.append(Quarantined(kind, str(row.get("id")), list(reasons[number]), text, **origin))
    return quarantined


def write_quarantine(path: Path, rows: Sequence[Quarantined]) -> None:
    """Write ``data/quarantine.parquet`` (see :class:`Quarantined`); an empty file when nothing was refused."""
    write_table(path, pa.Table.from_pylist([vars(row) for row in rows], schema=QUARANTINE_SCHEMA))
