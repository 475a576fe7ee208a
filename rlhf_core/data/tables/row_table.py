"""Rows of a parquet file that stay in Arrow's compact form until they are looked at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Generic, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rlhf_core.data.chunks import CHUNK_BYTES, rows_within
from rlhf_core.data.schema import Row, read_kind, rows_of_table

PART_ROWS = 1024


class RowTable(Sequence[Row], Generic[Row]):
    """Dataclass rows that are made anew each time they are asked for; an Arrow row takes little more than its texts.

    Args:
        table: All rows.
        cls: Their type.
        rows: Numbers of those that belong to the sequence, in its order; None for all.
    """

    def __init__(self, table: pa.Table, cls: type[Row], rows: npt.NDArray[np.int64] | None = None) -> None:
        self.table = table
        self.cls: type[Row] = cls
        self.rows = np.arange(table.num_rows) if rows is None else rows

    @classmethod
    def read(cls, path: Path, row_type: type[Row]) -> RowTable[Row]:
        """Read a parquet file; ``DataError`` when it is missing, unreadable or of another kind."""
        return cls(read_kind(path, row_type), row_type)

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, row: int) -> Row: ...

    @overload
    def __getitem__(self, row: slice) -> RowTable[Row]: ...

    def __getitem__(self, row: int | slice) -> Row | RowTable[Row]:
        if isinstance(row, slice):
            return RowTable(self.table, self.cls, self.rows[row])
        return rows_of_table(self.table.slice(int(self.rows[row]), 1), self.cls)[0]

    def __iter__(self) -> Iterator[Row]:
        part = min(PART_ROWS, rows_within(CHUNK_BYTES, self.table.num_rows, self.table.nbytes))
        for start in range(0, len(self.rows), part):
            yield from rows_of_table(self.table.take(self.rows[start : start + part]), self.cls)

    def select(self, rows: npt.NDArray[np.int64]) -> RowTable[Row]:
        """The given rows of this sequence, in the given order."""
        return RowTable(self.table, self.cls, self.rows[rows])
