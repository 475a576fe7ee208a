"""Rows of a kind in a parquet file, or some of them, read in parts as often as needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_core.data.schema import arrow_schema
from rlhf_core.data.tables.table_stream import table_chunks
from rlhf_core.errors import DataError


@dataclass(frozen=True)
class StoredRows:
    """Rows of a kind.

    Attributes:
        stored: How many rows the file has.
        kept: By row of the file, whether it is one of these (N,); None for all.
    """

    kind: str
    path: Path
    stored: int
    kept: npt.NDArray[np.bool_] | None = None

    @classmethod
    def of_file(cls, kind: str, path: Path) -> StoredRows:
        """All rows of a file; ``DataError`` when it is missing or has other columns than those of ``kind``."""
        if not path.is_file():
            raise DataError(f"{path} does not exist; run the stage that writes it")
        try:
            with pq.ParquetFile(path) as file:
                stored_schema, rows = file.schema_arrow, file.metadata.num_rows
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"{path} is not a readable parquet file ({error}); run the stage that writes it again"
            ) from error
        missing = [name for name in arrow_schema(kind).names if name not in stored_schema.names]
        if missing:
            raise DataError(f"{path} lacks the column {', '.join(missing)}; collect the data again")
        stored = cls(kind, path, rows)
        stored._as_schema(stored_schema.empty_table(), arrow_schema(kind).names)
        return stored

    @property
    def num_rows(self) -> int:
        """How many rows these are."""
        return self.stored if self.kept is None else int(self.kept.sum())

    @property
    def numbers(self) -> npt.NDArray[np.int64]:
        """Their numbers in the file."""
        return np.arange(self.stored) if self.kept is None else np.flatnonzero(self.kept)

    def where(self, keep: npt.NDArray[np.bool_]) -> StoredRows:
        """Those of the rows for which ``keep`` (one value for each) holds."""
        kept = np.zeros(self.stored, dtype=bool)
        kept[self.numbers[keep]] = True
        return replace(self, kept=kept)

    def parts(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Yield the rows in order, some thousand at a time, with all columns of the kind or some of them.

        Raises:
            DataError: The file is damaged, or a value is not of its column's type.
        """
        names = list(columns or arrow_schema(self.kind).names)
        start = 0
        for table in table_chunks(self.path, names):
            end = start + table.num_rows
            part = table if self.kept is None else table.filter(pa.array(self.kept[start:end]))
            start = end
            if part.num_rows:
                yield self._as_schema(part, names)

    def _as_schema(self, table: pa.Table, names: Sequence[str]) -> pa.Table:
        schema = pa.schema([arrow_schema(self.kind).field(name) for name in names])
        try:
            return table.select(names).cast(schema)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError) as error:
            raise DataError(f"{self.path} has columns of other types than the schema's: {error}") from error
