"""Tables in chunks bounded by rows and bytes, and parquet files in parts: never more of long rows
than a chunk.
"""

from __future__ import annotations

import json
import sys
import tracemalloc
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhf_core.data import tables as chunks
from rlhf_core.data import tables as table_stream
from rlhf_core.data.collection.sources import source_chunks, source_files
from rlhf_core.data.readers import detection as registry
from rlhf_core.data.readers import table_records as table_checks
from rlhf_core.data.readers.table_records import parquet_parts
from rlhf_core.data.schema import Message, arrow_schema, tables_of, write_table
from rlhf_core.data.tables import (
    TableWriter,
    bytes_in_memory,
    chunked,
    drained,
    rows_within,
    table_chunks,
    table_slices,
)
from rlhf_core.errors import DataError
from rlhf_extras.data_files.describe import EvenSample


def test_a_chunk_is_complete_with_its_items_or_its_bytes() -> None:
    assert list(chunked([1, 2, 3, 4, 5], 2, int, 100)) == [[1, 2], [3, 4], [5]]
    # 1 + 2 + 3 reach 6; one item may be larger than a chunk.
    assert list(chunked([1, 2, 3, 9, 1, 1], 10, int, 6)) == [[1, 2, 3], [9], [1, 1]]
    assert list(chunked([], 10, int)) == []


@pytest.mark.slow
def test_the_bytes_of_a_value_are_those_of_all_that_it_holds() -> None:
    assert bytes_in_memory("x" * 1000) == sys.getsizeof("x" * 1000)
    wide = "字" * 1000  # two bytes each
    assert bytes_in_memory(wide) > 2000
    row: dict[str, Any] = {"prompt": [Message("user", wide)], "turns": (["a"], {"b": wide})}
    assert 4000 < bytes_in_memory(row) < 6000
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert bytes_in_memory(deep) > 100_000 * sys.getsizeof(None)


def test_drained_items_are_not_held() -> None:
    items = [object() for _ in range(3)]
    rest = drained(items)
    first = next(rest)
    assert items == [] and sys.getrefcount(first) == 2
    assert len(list(rest)) == 2


def test_slices_of_a_table_hold_one_long_row_or_few_bytes() -> None:
    texts = ["short"] * 200 + ["x" * 50_000, "y" * 50_000] + ["short"] * 200
    table = pa.table({"text": texts})
    slices = list(table_slices(table, 100, 1000))
    assert pa.concat_tables(slices).to_pylist() == table.to_pylist()
    assert all(part.num_rows <= 100 for part in slices)
    assert all(part.num_rows == 1 or part.nbytes <= 2000 for part in slices)
    assert [part.num_rows for part in table_slices(table, 300, 10**6)] == [300, 102]
    assert not list(table_slices(table.slice(0, 0), 100))
    assert (
        rows_within(1000, 20, 6240),
        rows_within(1000, 20, 900),
        rows_within(1000, 2, 10**9),
    ) == (3, 20, 1)


def write_long_rows(folder: Path, count: int) -> None:
    """Write pairs of 20 kB behind five rows of another format."""
    other = [
        {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "a"}]}
        for i in range(5)
    ]
    pairs = [
        {"prompt": f"{i}? " + "x" * 20_000, "chosen": f"a{i}", "rejected": "b"}
        for i in range(count)
    ]
    (folder / "x.jsonl").write_text("\n".join(map(json.dumps, [*other, *pairs])))


def test_chunks_of_long_rows_are_the_rows_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The format is that of the first thousand rows, although the first chunk has fewer, all of
    them of another.
    """
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1000)
    write_long_rows(tmp_path, 100)
    (file,) = source_files(["x.jsonl"], tmp_path)
    parts = list(source_chunks(file, "preferences"))
    assert (
        len(parts) > 100
        and parts[0].rows == []
        and {part.counts.format for part in parts} == {"standard"}
    )
    assert [position for part in parts for position in part.positions] == list(range(6, 106))
    assert [row.position for part in parts for row in part.refused] == list(range(1, 6))
    rows = [row for part in parts for row in part.rows]
    tables = list(tables_of("preferences", rows))
    assert len(tables) == 100 and pa.concat_tables(tables).column("id").to_pylist() == [
        row["id"] for row in rows
    ]


def test_the_memory_does_not_grow_with_the_long_rows_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 200_000)
    monkeypatch.setattr(
        registry, "PROBE_BYTES", 1_200_000
    )  # some sixty records, of which five are of another format
    write_long_rows(tmp_path, 400)
    (file,) = source_files(["x.jsonl"], tmp_path)
    tracemalloc.start()
    try:
        rows = sum(len(part.rows) for part in source_chunks(file, "preferences"))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert rows == 400 and peak < 3_000_000, (
        "eight megabytes of prompts, and as much of their groups"
    )


def test_few_long_rows_are_read_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_checks, "CHUNK_BYTES", 10_000)
    texts = [f"{i}" * 1000 for i in range(10, 40)]  # 2,000 bytes each
    pq.write_table(
        pa.table({"text": texts}), tmp_path / "x.parquet", compression="none", use_dictionary=False
    )
    batches = [part for part, _ in parquet_parts("x.parquet", tmp_path / "x.parquet", 10**6)]
    assert max(batch.num_rows for batch in batches) == 4, "a text has a length beside its bytes"
    assert list(chain.from_iterable(batch.column("text").to_pylist() for batch in batches)) == texts


def test_a_sample_of_long_rows_is_small_and_spread_over_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rlhf_extras.data_files.describe.SAMPLED_BYTES", 11_000)
    sample = EvenSample()
    for start in range(0, 64, 8):
        numbers = range(start, start + 8)
        sample.add([{"text": f"{i:1000}"} for i in numbers], list(numbers))
    positions = [row["position"] for row in sample.spread()]
    # Eight rows of some 1,250 bytes fit; each time there are nine, every second one goes.
    assert positions == [0, 8, 16, 24, 32, 40, 48, 56]
    assert sum(map(bytes_in_memory, sample.rows)) <= 11_000


ROWS = [
    {
        "id": f"{i}",
        "prompt": [{"role": "user", "content": f"{i % 3}?"}],
        "reply": f"r{i}",
        "category": "c",
    }
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


@settings(max_examples=20, suppress_health_check=FIXTURE)
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


@settings(max_examples=20, suppress_health_check=FIXTURE)
@given(st.lists(st.integers(0, 60), max_size=9), st.integers(1, 25), st.integers(1, 70))
def test_many_row_groups_have_the_rows_in_order(
    tmp_path: Path, cuts: list[int], group: int, rows: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table_stream, "ROW_GROUP_ROWS", group)
        write(tmp_path / "x.parquet", cuts)
        patch.setattr(table_stream, "CHUNK_ROWS", rows)
        chunks = list(table_chunks(tmp_path / "x.parquet"))
    assert pa.concat_tables(chunks).to_pylist() == ROWS
    assert all(0 < chunk.num_rows <= rows for chunk in chunks)
    (names,) = {
        tuple(chunk.column_names) for chunk in table_chunks(tmp_path / "x.parquet", ["group", "id"])
    }
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


def test_no_chunk_holds_more_text_than_arrow_can_read(
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
