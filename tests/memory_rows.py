"""Rows of a kind from a table in memory, for tests of what reads stored rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rlhf_core.data.schema import arrow_schema
from rlhf_core.data.validation.stored_rows import Origins, StoredRows

PART_ROWS = 2


@dataclass(frozen=True)
class MemoryRows(StoredRows):
    """The rows of a table, two at a time."""

    table: pa.Table = None

    def parts(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        rows = self.table.take(pa.array(self.numbers)).select(list(columns or arrow_schema(self.kind).names))
        for start in range(0, rows.num_rows, PART_ROWS):
            yield rows.slice(start, PART_ROWS).combine_chunks()


def memory_rows(kind: str, rows: Sequence[Mapping[str, Any]], origins: Origins | None = None) -> MemoryRows:
    schema = arrow_schema(kind)
    table = pa.Table.from_pylist([{name: row[name] for name in schema.names} for row in rows], schema=schema)
    return MemoryRows(kind, Path("memory"), len(rows), None, origins, table)


def origins_of(source: str, positions: Sequence[int]) -> Origins:
    return Origins([source], np.zeros(len(positions), np.int32), np.array(positions))
