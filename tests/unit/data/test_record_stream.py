"""A file is read record by record, a part at a time, and the counts of its parts add up."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow.feather import write_feather
from unit.data.malformed.case import arrow, lines, parquet, table_text
from unit.data.malformed.containers import PACK

from rlhf_core.config.data import DataSource, ReadOptions
from rlhf_core.data.collection import rows as formats
from rlhf_core.data.collection.sources import source_chunks, source_files
from rlhf_core.data.readers.stream import stream_records
from rlhf_core.data.readers.table_records import parquet_parts
from rlhf_core.data.row_counts import (
    MOST_REASONS,
    OTHER_REASONS,
    READABLE,
    ReasonCounts,
    Record,
    RowCounts,
    RowFinding,
)
from rlhf_core.errors import DataError
from rlhf_core.runtime.limited_call import GIB, CallLimits, limit_reached

LINES = st.lists(
    st.one_of(
        st.binary(max_size=12),
        st.sampled_from(
            [
                b'{"a": 1}',
                b'{"a": "\xe2\x80\xa8"}',
                b"\xef\xbb\xbf",
                b'"x',
                b'a,"b',
                b'c"",d',
                b"e,f",
                b"\r",
            ]
        ),
    ),
    max_size=8,
).map(b"\n".join)


def streamed(path: Path) -> list[Record]:
    return list(stream_records(path))


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    LINES,
    st.sampled_from([".jsonl", ".csv", ".tsv", ".json"]),
    st.sampled_from([".gz", ".zst", ".xz"]),
)
def test_a_compressed_text_is_read_as_the_text(
    tmp_path: Path, content: bytes, kind: str, compression: str
) -> None:
    outcomes: list[list[Record] | str] = []
    for path, written in (
        (tmp_path / f"x{kind}", content),
        (tmp_path / f"x{kind}{compression}", None),
    ):
        path.write_bytes(PACK[compression](content) if written is None else written)
        try:
            outcomes.append(streamed(path))
        except DataError as error:
            outcomes.append(str(error).replace(f"{path}", "x"))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow", "stream.arrow", "x.arrow.gz"])
def test_tables_are_read_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("rlhf_core.data.readers.table_records.BATCH_ROWS", 3)
    dates = pa.array([0, 2**62, 1, None] * 4, pa.timestamp("ms"))  # the second is beyond Python's
    table = pa.table(
        {
            "n": list(range(16)),
            "at": dates,
            "turns": [[{"role": "user"}] * (i % 3) for i in range(16)],
        }
    )
    path = tmp_path / name
    if name == "x.parquet":
        pq.write_table(table, path, row_group_size=5)
    else:
        path.write_bytes(
            PACK.get(path.suffix, bytes)(arrow(table, stream=name.startswith("stream"), batch=7))
        )
    records = streamed(path)
    assert [record.value["n"] for record in records] == list(range(16))
    assert [record.value["turns"] for record in records] == table.column("turns").to_pylist()
    assert [record.position for record in records] == list(range(1, 17))
    assert [bool(record.problem) for record in records] == [False, True, False, False] * 4


@pytest.mark.parametrize(
    "name",
    [
        "x.jsonl",
        "x.jsonl.gz",
        "x.jsonl.xz",
        "x.parquet",
        "x.parquet.zst",
        "x.arrow",
        "x.json",
        "lines.json",
        "x.csv",
    ],
)
def test_the_bytes_that_were_read_add_up_to_the_file(tmp_path: Path, name: str) -> None:
    rows = [{"prompt": f"{i}?", "chosen": "a", "rejected": "b"} for i in range(9000)]
    path = tmp_path / name
    if name.endswith(".arrow"):
        write_feather(pa.Table.from_pylist(rows), path, chunksize=4000)
    else:
        contents = {
            "x.parquet": parquet,
            "x.csv": table_text,
            "x.json": lambda rows: json.dumps(rows).encode(),
        }
        write = contents.get(name.removesuffix(".zst"), lambda rows: lines(*rows))
        path.write_bytes(PACK.get(path.suffix, bytes)(write(rows)))
    counts: list[int] = []
    assert len(list(stream_records(path, counts.append))) == 9000
    assert max(counts) == path.stat().st_size


@pytest.mark.slow
@pytest.mark.parametrize("name", ["x.json", "x.jsonl.xz", "x.arrow"])
def test_a_file_is_not_held_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("rlhf_core.data.readers.json_records.HELD_CHARACTERS", 2**18)
    rows = [{"prompt": f"{i:0500}"} for i in range(20_000)]
    path = tmp_path / name
    if name == "x.arrow":
        write_feather(pa.Table.from_pylist(rows), path, compression="uncompressed")
    else:
        text = json.dumps(rows) if name == "x.json" else "\n".join(map(json.dumps, rows))
        # The dictionary of a higher preset alone takes eight megabytes.
        path.write_bytes(
            lzma.compress(text.encode(), preset=0) if path.suffix == ".xz" else text.encode()
        )
        del text
    del rows
    tracemalloc.start()
    try:
        count = sum(1 for _ in stream_records(path))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 20_000 and peak < 10_000_000 * 0.75, (
        "ten megabytes of text, of which a part is held"
    )


def test_rows_in_chunks_are_the_rows_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first chunk decides format and columns; later ones need not have all of them."""
    monkeypatch.setattr(formats, "CHUNK_RECORDS", 1000)
    rows = [{"q": f"{i}?", "good": "a", "bad": "b", "margin": 1} for i in range(1500)]
    rows += [{"q": f"{i}?", "good": "a"} for i in range(1500, 2600)]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    columns = {"prompt": "q", "chosen": "good", "rejected": "bad"}
    (file,) = source_files([DataSource(path="x.jsonl", columns=columns)], tmp_path)
    read_so_far, chunks = [], []
    for chunk in source_chunks(file, "preferences"):
        read_so_far.append(chunk.counts.records)
        chunks.append(chunk)
    assert read_so_far == [1000, 2000, 2600]
    assert [position for chunk in chunks for position in chunk.positions] == list(range(1, 1501))
    assert [row["prompt"][0]["content"] for row in chunks[1].rows] == [
        f"{i}?" for i in range(1000, 1500)
    ]
    assert [row.position for chunk in chunks for row in chunk.refused] == list(range(1501, 2601))


def test_a_file_that_grows_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "CHUNK_RECORDS", 1)
    row = json.dumps({"prompt": "a?", "chosen": "b", "rejected": "c"}) + "\n"
    path = tmp_path / "x.jsonl"
    path.write_text(row * 3)
    (file,) = source_files(["x.jsonl"], tmp_path)
    chunks = source_chunks(file, "preferences")
    next(chunks)
    with path.open("a") as stream:
        stream.write(row)
    with pytest.raises(DataError, match=r"x\.jsonl changed while it was read"):
        list(chunks)


def test_few_rows_of_a_repeated_text_are_read_at_a_time(tmp_path: Path) -> None:
    """Only rows that are read show what a dictionary expands to; usual rows are read by the thousand."""
    pq.write_table(pa.table({"a": ["x" * 1000] * 3000}), tmp_path / "repeated.parquet")
    pq.write_table(pa.table({"a": [f"{n} " * 20 for n in range(3000)]}), tmp_path / "usual.parquet")
    sizes = []
    for name in ("repeated", "usual"):
        sizes.append(
            [part.num_rows for part, _ in parquet_parts(name, tmp_path / f"{name}.parquet", 10**6)]
        )
    assert sizes == [[64] * 46 + [56], [2048, 952]]


@pytest.mark.parametrize(
    "column",
    [
        pa.nulls(3_000_000),
        pa.nulls(3_000_000, pa.string()),
        pa.repeat("a", 3_000_000),
        pa.array(["a" * 70_000_000]),
    ],
    ids=["nulls", "missing-texts", "one-letter", "one-long-text"],
)
def test_a_table_of_far_more_than_its_file_could_hold_is_refused_before_it_is_read(
    column: pa.Array, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table({"a": column}), tmp_path / "x.parquet", compression="zstd")
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda *_, **__: pytest.fail("it is read"))
    with pytest.raises(DataError, match="more than 200 times its size"):
        next(stream_records(tmp_path / "x.parquet"))


def repeated_text(count: int, text: str = "a" * 1_000_000) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), [text])


def of_one_list(values: pa.Array, large: bool = False) -> pa.Array:
    offsets = pa.array([0, len(values)], pa.int64() if large else pa.int32())
    return (pa.LargeListArray if large else pa.ListArray).from_arrays(offsets, values)


def empty_structs(count: int) -> pa.StructArray:
    return pa.StructArray.from_buffers(pa.struct([]), count, [None])


def text_views(count: int, text: bytes = b"a" * 1_000_000) -> pa.Array:
    view = len(text).to_bytes(4, "little") + text[:4] + bytes(8)
    return pa.Array.from_buffers(
        pa.string_view(), count, [None, pa.py_buffer(view * count), pa.py_buffer(text)]
    )


LARGE_COLUMNS = {
    "list of nulls": lambda n: of_one_list(pa.nulls(10**6 * n)),
    "large list of nulls": lambda n: of_one_list(pa.nulls(10**6 * n), large=True),
    "fixed list of nulls": lambda n: pa.FixedSizeListArray.from_arrays(
        pa.nulls(10**6 * n), 10**6 * n
    ),
    "list of empty objects": lambda n: of_one_list(empty_structs(10**5 * n)),
    "empty objects in an object": lambda n: of_one_list(
        pa.StructArray.from_arrays([empty_structs(10**5 * n)], ["a"])
    ),
    "list of a repeated text": lambda n: of_one_list(repeated_text(n)),
    "lists of lists of it": lambda n: of_one_list(of_one_list(repeated_text(n), large=True)),
    "fixed list of it": lambda n: pa.FixedSizeListArray.from_arrays(repeated_text(n), n),
    "objects of it": lambda n: of_one_list(pa.StructArray.from_arrays([repeated_text(n)], ["a"])),
    "map of it": lambda n: pa.MapArray.from_arrays(
        [0, n], pa.array([str(i) for i in range(n)]), repeated_text(n)
    ),
    "repeated bytes": lambda n: of_one_list(
        repeated_text(n).cast(pa.dictionary(pa.int32(), pa.binary()))
    ),
    "repeated bytes of one size": lambda n: of_one_list(
        pa.DictionaryArray.from_arrays([0] * n, pa.array([b"a" * 10**6], pa.binary(10**6)))
    ),
    "views of one text": lambda n: of_one_list(text_views(n)),
    "list of no views": lambda n: of_one_list(pa.nulls(10**5 * n, pa.string_view())),
}


@pytest.mark.parametrize("kind", LARGE_COLUMNS)
@pytest.mark.parametrize("stream", [False, True], ids=["file", "stream"])
def test_nested_values_of_far_more_than_a_table_are_refused(
    tmp_path: Path, kind: str, stream: bool
) -> None:
    for count, is_read in ((2, True), (200, False)):
        table = pa.table({"a": LARGE_COLUMNS[kind](count)})
        with pa.OSFile(str(tmp_path / "x.arrow"), "wb") as file:
            options = pa.ipc.IpcWriteOptions(compression="zstd")
            with (pa.ipc.new_stream if stream else pa.ipc.new_file)(
                file, table.schema, options=options
            ) as writer:
                writer.write_table(table)
        if is_read:
            assert len(streamed(tmp_path / "x.arrow")) == 1
            continue
        with pytest.raises(
            DataError, match=r"values of more than 200 times its size|GiB of memory"
        ):
            streamed(tmp_path / "x.arrow")


def test_values_that_could_share_others_in_ways_that_are_not_counted_are_refused(
    tmp_path: Path,
) -> None:
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([300], pa.int32()), ["a"])
    texts, lists = pa.array(["a"] * 300), pa.array([["a"]])
    union = pa.UnionArray.from_dense(
        pa.array([0] * 300, pa.int8()), pa.array([0] * 300, pa.int32()), [texts]
    )
    views = pa.ListViewArray.from_arrays([0] * 300, [300] * 300, texts)
    for column in (runs, union, views, pa.DictionaryArray.from_arrays([0] * 300, lists)):
        for kind in (column, pa.StructArray.from_arrays([column], ["a"]), of_one_list(column)):
            (tmp_path / "x.arrow").write_bytes(arrow(pa.table({"a": kind})))
            with pytest.raises(
                DataError, match="are not read; save them as texts, numbers, lists or objects"
            ):
                streamed(tmp_path / "x.arrow")


def zigzag(number: int, length: int = 0) -> bytes:
    """A number as Thrift's compact protocol writes it, in at least ``length`` bytes."""
    left, written = 2 * number, []
    while left > 127 or len(written) + 1 < length:
        written.append(left & 127 | 128)
        left >>= 7
    return bytes([*written, left])


def expanding_parquet(path: Path, column: pa.Array, *, dictionary: bool) -> None:
    """Write a file whose footer claims too little for a large column, unlike its page."""
    pq.write_table(
        pa.table({"prompt": ["a"], "other": column}),
        path,
        compression="zstd",
        use_dictionary=dictionary,
    )
    group = pq.read_metadata(path).row_group(0)
    content = path.read_bytes()
    for size in {group.total_byte_size, group.column(1).total_uncompressed_size}:
        told = zigzag(size)
        assert told in content
        content = content.replace(told, zigzag(1000, len(told)))
    path.write_bytes(content)


def expanding_arrow(path: Path, column: pa.Array, *, stream: bool) -> None:
    """Write a column of zeros, compressed, beside a prompt."""
    table = pa.table({"prompt": ["a"], "other": column})
    with pa.OSFile(str(path), "wb") as file:
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with (pa.ipc.new_stream if stream else pa.ipc.new_file)(
            file, table.schema, options=options
        ) as writer:
            writer.write_table(table)


EXPANDING: dict[str, tuple[str, Callable[[Path, pa.Array], None]]] = {
    "arrow file": ("x.arrow", partial(expanding_arrow, stream=False)),
    "arrow stream": ("x.arrow", partial(expanding_arrow, stream=True)),
    "parquet page": ("x.parquet", partial(expanding_parquet, dictionary=False)),
    "parquet dictionary": ("x.parquet", partial(expanding_parquet, dictionary=True)),
}


# Writing so large a value takes seconds of the system's time.
EXPANDING_CASES = [
    kind if kind == "arrow file" else pytest.param(kind, marks=pytest.mark.slow)
    for kind in EXPANDING
]


@pytest.mark.parametrize("kind", EXPANDING_CASES)
def test_a_table_that_expands_without_measure_is_refused_before_it_fills_the_memory(
    tmp_path: Path, kind: str
) -> None:
    name, write = EXPANDING[kind]
    write(tmp_path / name, pa.array([bytes(160 * 2**20)], pa.large_binary()))
    assert (tmp_path / name).stat().st_size < 100_000
    refused = tmp_path / "refused"

    def read() -> None:
        with pytest.raises(
            DataError,
            match=r".*/x\.\w+ cannot be read: that took more than 0\.\d GiB of memory; .*JSON lines$",
        ):
            streamed(tmp_path / name)
        refused.touch()

    assert limit_reached(read, CallLimits(memory=3 * GIB // 8)) is None
    assert refused.exists()


def deep_parquet(depth: int, repetition: int) -> bytes:
    """Return a parquet file without rows, of one column in so many groups.

    Each is required, optional or repeated: 0 to 2.
    """

    def varint(number: int) -> bytes:
        return (
            bytes([number & 127 | 128]) + varint(number >> 7) if number > 127 else bytes([number])
        )

    # Fields of Thrift's compact protocol: (type), repetition, name, (count of children).
    root, leaf = (
        b"\x48\x01r\x15\x02\0",
        b"\x15\x0c" + bytes([0x25, 2 * repetition]) + b"\x18\x01l\0",
    )
    groups = (bytes([0x35, 2 * repetition]) + b"\x18\x01g\x15\x02\0") * depth
    footer = b"\x15\x02\x19\xfc" + varint(depth + 2) + root + groups + leaf + b"\x16\0\x19\x0c\0"
    return b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1"


@pytest.mark.parametrize("repetition", [0, 1, 2], ids=["required", "optional", "repeated"])
@pytest.mark.parametrize("name", ["x.parquet", "x.parquet.gz"])
def test_a_schema_too_deep_to_be_read_is_refused_and_does_not_end_the_process(
    tmp_path: Path, name: str, repetition: int
) -> None:
    refused = ".* cannot be read: that ended its process by SIGSEGV"
    for depth, message in (
        (20, "is empty"),
        (10_000, refused),
        (20_000, refused),
        (60_000, refused),
    ):
        content = deep_parquet(depth, repetition)
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        with pytest.raises(DataError, match=message):
            streamed(tmp_path / name)


def test_a_long_footer_of_many_columns_is_read(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({f"column {n}": ["a", "b"] for n in range(500)}), tmp_path / "x.parquet"
    )
    assert (
        pq.read_metadata(tmp_path / "x.parquet").serialized_size > 2**15
        and len(streamed(tmp_path / "x.parquet")) == 2
    )


def test_messages_of_a_tree_may_be_in_different_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "CHUNK_RECORDS", 2)
    question = {"message_id": "q", "parent_id": None, "role": "prompter", "text": "Why?"}
    replies = [
        {
            "message_id": f"a{rank}",
            "parent_id": "q",
            "role": "assistant",
            "text": f"reply {rank}",
            "rank": rank,
        }
        for rank in range(4)
    ]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, [*replies, question])))
    (file,) = source_files(["x.jsonl"], tmp_path)
    (chunk,) = source_chunks(file, "preferences")
    assert (chunk.counts.format, chunk.counts.records, len(chunk.rows)) == (
        "oasst-messages",
        1,
        6,
    ) and not chunk.refused


def test_an_arrow_file_that_shrinks_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.arrow"
    path.write_bytes(
        arrow(pa.table({"prompt": [f"{i:0900}" for i in range(1000)]}), stream=True, batch=50)
    )
    records = stream_records(path)
    next(records)
    os.truncate(path, 100_000)
    with pytest.raises(DataError, match="not a readable arrow file"):
        list(records)


@pytest.mark.parametrize(
    ("name", "content", "line", "byte"),
    [
        ("x.json", '[\n"天",\n"天",\n"'.encode() + b'\xff"]', 4, 0xFF),
        ("x.json", '\ufeff[\n"天",\n'.encode() + b'"caf\xe9"]', 3, 0xE9),
        ("x.json", b'[\n{"prompt": "\xe5\xa4', 2, 0xE5),  # cut off inside a character
        ("x.json.gz", b'[\n"caf\xe9"]', 2, 0xE9),
    ],
)
def test_bytes_of_json_that_are_not_utf8_are_named_by_line_and_place_wherever_a_chunk_ends(
    name: str, content: bytes, line: int, byte: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, place = tmp_path / name, content.rindex(byte)
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    for size in range(4, len(content) + 1):
        monkeypatch.setattr("rlhf_core.data.readers.json_records.CHUNK", size)
        with pytest.raises(DataError) as refused:
            streamed(path)
        expected = f"line {line}, is not UTF-8 (byte 0x{byte:02x}, {place} bytes from the start of the file)"
        assert str(refused.value) == f"{path}, {expected}; save it as UTF-8"


MANY = {  # of some 30 MB, which their files hold in a fraction
    "lists": b"[" + b"[]," * 10_000_000 + b"[]]",
    "objects": b"[" + b"{}," * 10_000_000 + b"{}]",
    "numbers": b"[" + b"0," * 15_000_000 + b"0]",
    "strings": b"[" + b'"",' * 5_000_000 + b'""]',
    "keys": b"{" + b",".join(b'"%d":0' % n for n in range(1_300_000)) + b"}",
    "behind a long text": b'["' + b"," * 15_000_000 + b'"' + b",[]" * 8_000_000 + b"]",
}


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.slow) if k == "keys" else k for k in MANY]
)
@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.json.gz"])
def test_a_row_of_many_values_is_refused_before_it_fills_the_memory(
    tmp_path: Path, name: str, kind: str
) -> None:
    path, row = tmp_path / name, b'{"prompt": "Why?", "more": ' + MANY[kind] + b"}"
    whole = b"[" + row + b"]" if name == "x.json.gz" else row
    path.write_bytes(gzip.compress(whole, 1))
    if name == "x.json.gz":
        with pytest.raises(
            DataError,
            match=r"x\.json\.gz holds a row of more than 1000000 values \(line 1 column 2",
        ):
            streamed(path)
    else:
        (record,) = streamed(path)
        assert record.problem == "the line has more than 1000000 values"
    assert limit_reached(lambda: streamed(path), CallLimits(memory=GIB // 2)) is None


@pytest.mark.parametrize("name", ["x.jsonl", "x.json"])
def test_a_text_that_looks_like_many_values_is_one(tmp_path: Path, name: str) -> None:
    rows = [{"prompt": ',[{"\\' * 1_000_000}, {"prompt": [0] * 900_000}, {"prompt": "a"}]
    written = json.dumps(rows) if name == "x.json" else "\n".join(map(json.dumps, rows))
    (tmp_path / name).write_text(written)
    assert [record.value for record in streamed(tmp_path / name)] == rows


@pytest.mark.parametrize("rows", [100, 300_000])
def test_an_object_may_hold_more_rows_than_a_row_holds_values(tmp_path: Path, rows: int) -> None:
    (tmp_path / "x.json").write_text(json.dumps({"data": [{"a": 1, "b": 2, "c": 3}] * rows}))
    assert len(streamed(tmp_path / "x.json")) == rows


@pytest.mark.parametrize("end", [b"\n", b""])
@pytest.mark.parametrize("compression", ["", ".gz", ".zst", ".xz"])
def test_a_line_that_is_too_long_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str, end: bytes
) -> None:
    monkeypatch.setattr("rlhf_core.data.readers.json_records.MAX_LINE", 2**20)
    path, pack = tmp_path / f"x.jsonl{compression}", PACK.get(compression, bytes)
    path.write_bytes(pack(b'{"a": "' + b"b" * (2**20 - 9) + b'"}' + end))
    assert [record.problem for record in streamed(path)] == [""]
    path.write_bytes(pack(b'{"a": 1}\n{"a": "' + b"b" * (2**20 - 8) + b'"}' + end))
    with pytest.raises(DataError, match=r"line 2, is longer than 1 MiB; a line holds one row"):
        streamed(path)


def xz(dictionary: int) -> bytes:
    """Return a row as xz whose header asks for a dictionary of 2**(12 + n/2) bytes; 40 means 4 GiB."""
    content = bytearray(lzma.compress(b'{"prompt": "Why?"}\n', preset=0))
    end = 12 + 4 * content[12]  # of the block's header, before its CRC
    content[16] = dictionary
    content[end : end + 4] = zlib.crc32(content[12:end]).to_bytes(4, "little")
    return bytes(content)


@pytest.mark.parametrize("before", [b"", xz(0)], ids=["first", "second"])
@pytest.mark.parametrize("dictionary", [40, 39, 37])
@pytest.mark.parametrize("name", ["x.jsonl.xz", "x.csv.xz", "x.parquet.xz"])
def test_a_dictionary_of_xz_that_would_fill_the_memory_is_refused(
    tmp_path: Path, name: str, dictionary: int, before: bytes
) -> None:
    (tmp_path / name).write_bytes(before + xz(dictionary))
    with pytest.raises(
        DataError,
        match=r"xz takes more than 1 GiB of memory to unpack; pack it with `xz -9` or less",
    ):
        streamed(tmp_path / name)
    (tmp_path / "x.jsonl.xz").write_bytes(xz(28) * 2)  # 64 MiB, as of xz -9
    assert len(streamed(tmp_path / "x.jsonl.xz")) == 2


def test_a_full_disk_is_no_fault_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compressed table is unpacked into a temporary file, here on a device that is full."""
    pq.write_table(pa.table({"prompt": ["a?"]}), tmp_path / "x.parquet")
    packed = tmp_path / "x.parquet.gz"
    packed.write_bytes(gzip.compress((tmp_path / "x.parquet").read_bytes()))
    message = r"cannot unpack .*x\.parquet\.gz into .*: No space left on device; make room"
    with open("/dev/full", "wb", buffering=0) as full, pytest.raises(DataError, match=message):
        monkeypatch.setattr("tempfile.NamedTemporaryFile", lambda prefix: full)
        list(stream_records(packed))


def finding(reason: str, position: int = 1) -> RowFinding:
    return RowFinding(READABLE, "preferences", reason, "a.jsonl", position)


def test_parts_of_a_source_share_the_counts_of_what_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(formats, "CHUNK_RECORDS", 10)
    pair: dict[str, Any] = {"prompt": "a?", "chosen": "yes", "rejected": "no"}
    values = [pair | {"chosen": str(n), "notes": "x"} for n in range(8)]
    values += [pair | {"margin": 0}, pair | {"chosen": None}]
    records = [Record(position, value) for position, value in enumerate(2 * values, 1)]
    arguments = ("preferences", "a.jsonl", "", "a.jsonl", ReadOptions())
    read = [
        (part.counts, part.counts.records, len(part.rows))
        for part in formats.row_chunks(iter(records), *arguments)
    ]
    counts = read[0][0]
    assert [(each is counts, records) for each, records, _ in read] == [
        (True, 10),
        (True, 20),
    ]
    assert sum(rows for _, _, rows in read) == counts.kept == 16
    assert (counts.refused, counts.dropped.total(), counts.unused) == (2, 2, Counter(notes=16))
    (reason,) = counts.reasons.commonest()
    assert (reason.rows, reason.positions, reason.first.position) == (2, [10, 20], 10)
    counts.cut_to(10)
    assert (counts.kept, counts.cut) == (10, 6)
    again = RowCounts.of_manifest("preferences", counts.as_dict() | {"share": 1.0})
    assert (again.kept, again.refused, again.dropped, again.unused) == (
        10,
        2,
        counts.dropped,
        Counter(notes=16),
    )


def test_a_file_with_a_reason_for_each_row_does_not_fill_the_memory() -> None:
    counts = ReasonCounts.of(
        finding(f"margin {n} is not a number", n) for n in range(3 * MOST_REASONS)
    )
    assert (
        len(counts) == MOST_REASONS + 1
        and sum(count.rows for count in counts.values()) == 3 * MOST_REASONS
    )
    assert counts.commonest()[0].reason == OTHER_REASONS
