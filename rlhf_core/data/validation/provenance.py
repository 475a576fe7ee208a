"""Which file and line each row was read from: ``data/raw/provenance.parquet``, in the order of the rows of a kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rlhf_core.data.tables.table_stream import table_chunks

PROVENANCE_SCHEMA = pa.schema(
    [("kind", pa.string()), ("id", pa.string()), ("source", pa.string()), ("position", pa.int64())]
)
# Ids of derived prompts whose records give no other row: nothing that they come from can fail validation.
PROMPT_ONLY = "prompt_only.parquet"
PROMPT_ONLY_SCHEMA = pa.schema([("id", pa.string())])


@dataclass(frozen=True)
class Origin:
    """The file that a row was read from, as params.yaml spells it, and the line or number of the row there."""

    source: str
    position: int

    def __str__(self) -> str:
        return f"{self.source}:{self.position}"


@dataclass(frozen=True)
class Origins:
    """The origins of the rows of a kind, in their order.

    Attributes:
        sources: The files.
        source: By row, the number of its file (N,).
        position: By row, its position there (N,).
    """

    sources: Sequence[str]
    source: npt.NDArray[np.int32]
    position: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.position)

    def __getitem__(self, row: int) -> Origin:
        return Origin(self.sources[self.source[row]], int(self.position[row]))


def provenance_table(kind: str, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return the ``path`` and ``position`` of rows of a kind as they are stored."""
    listed = [{"kind": kind, "id": row["id"], "source": row["path"], "position": row["position"]} for row in rows]
    return pa.Table.from_pylist(listed, schema=PROVENANCE_SCHEMA)


def read_provenance(path: Path) -> dict[str, Origins]:
    """Return the origins of the rows of each kind; none where the rows are from no file."""
    numbers: dict[str, int] = {}
    parts: dict[str, list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]]] = {}
    for chunk in table_chunks(path, ["kind", "source", "position"]) if path.exists() else ():
        kinds = chunk.column("kind").to_numpy()
        source = np.array([numbers.setdefault(s, len(numbers)) for s in chunk.column("source").to_pylist()], np.int32)
        position = chunk.column("position").to_numpy()
        for kind in dict.fromkeys(kinds):
            parts.setdefault(kind, []).append((source[kinds == kind], position[kinds == kind]))
    names = list(numbers)
    return {
        kind: Origins(names, np.concatenate([s for s, _ in listed]), np.concatenate([p for _, p in listed]))
        for kind, listed in parts.items()
    }


def read_prompt_only(path: Path) -> frozenset[str]:
    """Return the ids of the prompts whose records give no other row; none where there is no such file."""
    chunks = table_chunks(path) if path.exists() else ()
    return frozenset(row_id for table in chunks for row_id in table.column("id").to_pylist())
