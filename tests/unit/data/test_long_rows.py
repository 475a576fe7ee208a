"""Tables of rows so long that few of them fill a row group."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf_core.data import tables as table_stream
from rlhf_core.data.tables import TableWriter, table_chunks


def test_no_row_group_and_no_chunk_holds_more_text_than_arrow_can_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_stream, "ROW_GROUP_BYTES", 1000)
    turns = [[{"role": "user", "content": f"{i:03} " + "x" * 296}] for i in range(20)]
    table = pa.table({"prompt": turns})
    with TableWriter(tmp_path / "long.parquet", table.schema) as writer:
        writer.write(table)  # 20 rows of about 310 bytes at once
    # Slices of three rows, some 930 bytes, are joined until there are 1,000: two of them.
    assert pq.ParquetFile(tmp_path / "long.parquet").num_row_groups == 4
    chunks = list(table_chunks(tmp_path / "long.parquet"))
    assert [chunk.num_rows for chunk in chunks] == [6, 6, 6, 2]
    assert pa.concat_tables(chunks).to_pylist() == table.to_pylist()
