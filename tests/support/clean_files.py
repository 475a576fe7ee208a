"""Clean data files of given rows."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rlhf_core.data.schema import Row, as_dict, clean_schema, clean_table, tables_of
from rlhf_core.data.tables import TableWriter


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write rows of one kind, of which there is at least one, to a clean file."""
    listed = list(rows)
    kind = listed[0].KIND
    with TableWriter(path, clean_schema(kind)) as writer:
        for table in tables_of(kind, [as_dict(row) for row in listed]):
            writer.write(clean_table(kind, table))
