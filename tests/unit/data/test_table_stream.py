"""Parquet files in parts: the bytes of a small one, the values of any, and nothing where writing failed."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhf_core.data import tables as table_stream
from rlhf_core.data.schema import arrow_schema, write_table
from rlhf_core.data.tables import TableWriter, table_chunks
from rlhf_core.errors import DataError

ROWS = [
    {"id": f"{i}", "prompt": [{"role": "user", "content": f"{i % 3}?"}], "reply": f"r{i}", "category": "c"}
    | {"source": None, "group": f"g{i % 7}"}
    for i in range(60)
]
TABLE = pa.Table.from_pylist(ROWS, schema=arrow_schema("demonstrations"))
FIXTURE = [HealthCheck.function_scoped_fixture]


def write(path: Path, cuts: list[int]) -> None:
    bounds = [0, *sorted(cuts), len(ROWS)]
    with TableWriter(path, TABLE.schema) as writer:
        for start, end in pairwise(bounds):
            writer.write(TABLE.slice(start, end - start))


@settings(max_examples=20, deadline=None, suppress_health_check=FIXTURE)
@given(st.lists(st.integers(0, 60), max_size=5))
def test_one_row_group_has_the_bytes_of_the_whole_table(tmp_path: Path, cuts: list[int]) -> None:
    write_table(tmp_path / "whole.parquet", TABLE)
    write(tmp_path / "parts.parquet", cuts)
    assert (tmp_path / "parts.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()


def test_an_empty_table_has_the_bytes_of_one(tmp_path: Path) -> None:
    write_table(tmp_path / "whole.parquet", TABLE.slice(0, 0))
    with TableWriter(tmp_path / "parts.parquet", TABLE.schema):
        pass
    assert (tmp_path / "parts.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()
    assert list(table_chunks(tmp_path / "parts.parquet")) == []


@settings(max_examples=20, deadline=None, suppress_health_check=FIXTURE)
@given(st.lists(st.integers(0, 60), max_size=9), st.integers(1, 25), st.integers(1, 70))
def test_many_row_groups_have_the_rows_in_order(tmp_path: Path, cuts: list[int], group: int, rows: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table_stream, "ROW_GROUP_ROWS", group)
        write(tmp_path / "x.parquet", cuts)
        patch.setattr(table_stream, "CHUNK_ROWS", rows)
        chunks = list(table_chunks(tmp_path / "x.parquet"))
    assert pa.concat_tables(chunks).to_pylist() == ROWS
    assert all(0 < chunk.num_rows <= rows for chunk in chunks)
    (names,) = {tuple(chunk.column_names) for chunk in table_chunks(tmp_path / "x.parquet", ["group", "id"])}
    assert set(names) == {"group", "id"}


def test_nothing_is_left_of_a_file_that_could_not_be_written_to_its_end(tmp_path: Path) -> None:
    write(tmp_path / "x.parquet", [])
    before = (tmp_path / "x.parquet").read_bytes()
    with pytest.raises(RuntimeError), TableWriter(tmp_path / "x.parquet", TABLE.schema) as writer:
        writer.write(TABLE.slice(0, 3))
        raise RuntimeError
    assert (tmp_path / "x.parquet").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["x.parquet"]


def test_unusable_files_are_a_users_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist; run the stage"):
        list(table_chunks(tmp_path / "none.parquet"))
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match="not a readable parquet file"):
        list(table_chunks(tmp_path / "bad.parquet"))


def test_a_file_is_readable_by_others(tmp_path: Path) -> None:
    write(tmp_path / "x.parquet", [5])
    assert pq.read_table(tmp_path / "x.parquet").num_rows == 60
    assert (tmp_path / "x.parquet").stat().st_mode & 0o777 == 0o644


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
