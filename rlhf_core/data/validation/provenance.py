"""Which file and line each row was read from: ``data/raw/provenance.parquet``, in the order of the rows of a kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from rlhf_core.data.schema import read_table, write_table

PROVENANCE_SCHEMA = pa.schema(
    [("kind", pa.string()), ("id", pa.string()), ("source", pa.string()), ("position", pa.int64())]
)


@dataclass(frozen=True)
class Origin:
    """The file that a row was read from, as params.yaml spells it, and the line or number of the row there."""

    source: str
    position: int


def write_provenance(path: Path, rows: Mapping[str, Iterable[Mapping[str, Any]]]) -> None:
    """Write the ``path`` and ``position`` of every row, by kind."""
    listed = [
        {"kind": kind, "id": row["id"], "source": row["path"], "position": row["position"]}
        for kind, of_kind in rows.items()
        for row in of_kind
    ]
    write_table(path, pa.Table.from_pylist(listed, schema=PROVENANCE_SCHEMA))


def read_provenance(path: Path) -> dict[str, list[Origin]]:
    """Return the origins of the rows of each kind, in their order; none where the rows are from no file."""
    origins: dict[str, list[Origin]] = {}
    for row in read_table(path).to_pylist() if path.exists() else ():
        origins.setdefault(row["kind"], []).append(Origin(row["source"], row["position"]))
    return origins
