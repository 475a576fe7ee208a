"""A file is read record by record, with a part of it in memory at a time, whatever holds the records."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow.feather import write_feather
from unit.data.malformed.case import arrow, lines, parquet, table_text
from unit.data.malformed.compressed import PACK

from rlhf_core.config.data import DataSource
from rlhf_core.data.collection import rows as formats
from rlhf_core.data.collection.sources import source_chunks, source_files
from rlhf_core.data.readers.content import Record
from rlhf_core.data.readers.stream import stream_records
from rlhf_core.data.readers.table_records import parquet_tables
from rlhf_core.errors import DataError

LINES = st.lists(
    st.one_of(
        st.binary(max_size=12),
        st.sampled_from(
            [b'{"a": 1}', b'{"a": "\xe2\x80\xa8"}', b"\xef\xbb\xbf", b'"x', b'a,"b', b'c"",d', b"e,f", b"\r"]
        ),
    ),
    max_size=8,
).map(b"\n".join)


def streamed(path: Path) -> list[Record]:
    return list(stream_records(path))


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(LINES, st.sampled_from([".jsonl", ".csv", ".tsv", ".json"]), st.sampled_from([".gz", ".zst", ".xz"]))
def test_a_compressed_text_file_is_read_as_the_text(
    tmp_path: Path, content: bytes, kind: str, compression: str
) -> None:
    outcomes: list[list[Record] | str] = []
    for path, written in ((tmp_path / f"x{kind}", content), (tmp_path / f"x{kind}{compression}", None)):
        path.write_bytes(PACK[compression](content) if written is None else written)
        try:
            outcomes.append(streamed(path))
        except DataError as error:
            outcomes.append(str(error).replace(f"{path}", "x"))
    assert outcomes[0] == outcomes[1]


def test_parquet_files_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_core.data.readers.table_records.BATCH_ROWS", 3)
    dates = pa.array([0, 2**62, 1, None] * 4, pa.timestamp("ms"))  # the second is beyond Python's
    table = pa.table({"n": list(range(16)), "at": dates, "turns": [[{"role": "user"}] * (i % 3) for i in range(16)]})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=5)
    records = streamed(tmp_path / "x.parquet")
    assert [record.value["n"] for record in records] == list(range(16))
    assert [record.value["turns"] for record in records] == table.column("turns").to_pylist()
    assert [record.position for record in records] == list(range(1, 17))
    assert [bool(record.problem) for record in records] == [False, True, False, False] * 4


@pytest.mark.parametrize(
    "name",
    ["x.jsonl", "x.jsonl.gz", "x.jsonl.xz", "x.parquet", "x.parquet.zst", "x.arrow", "x.json", "lines.json", "x.csv"],
)
def test_the_bytes_that_were_read_add_up_to_the_file(tmp_path: Path, name: str) -> None:
    rows = [{"prompt": f"{i}?", "chosen": "a", "rejected": "b"} for i in range(9000)]
    path = tmp_path / name
    if name.endswith(".arrow"):
        write_feather(pa.Table.from_pylist(rows), path, chunksize=4000)
    else:
        contents = {"x.parquet": parquet, "x.csv": table_text, "x.json": lambda rows: json.dumps(rows).encode()}
        write = contents.get(name.removesuffix(".zst"), lambda rows: lines(*rows))
        path.write_bytes(PACK.get(path.suffix, bytes)(write(rows)))
    counts: list[int] = []
    assert len(list(stream_records(path, counts.append))) == 9000
    assert max(counts) == path.stat().st_size


@pytest.mark.parametrize("name", ["x.arrow", "stream.arrow", "x.arrow.gz"])
def test_arrow_files_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("rlhf_core.data.readers.table_records.BATCH_ROWS", 3)
    table = pa.table({"n": list(range(16)), "turns": [[{"role": "user"}] * (i % 3) for i in range(16)]})
    path = tmp_path / name
    path.write_bytes(PACK.get(path.suffix, bytes)(arrow(table, stream=name.startswith("stream"), batch=7)))
    assert [record.value for record in streamed(path)] == table.to_pylist()
    assert [record.position for record in streamed(path)] == list(range(1, 17))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["x.json", "x.jsonl.xz", "x.arrow"])
def test_a_file_is_not_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("rlhf_core.data.readers.json_records.HELD_CHARACTERS", 2**18)
    rows = [{"prompt": f"{i:0500}"} for i in range(20_000)]
    path = tmp_path / name
    if name == "x.arrow":
        write_feather(pa.Table.from_pylist(rows), path, compression="uncompressed")
    else:
        text = json.dumps(rows) if name == "x.json" else "\n".join(map(json.dumps, rows))
        # The dictionary of a higher preset alone takes eight megabytes.
        path.write_bytes(lzma.compress(text.encode(), preset=0) if path.suffix == ".xz" else text.encode())
        del text
    del rows
    tracemalloc.start()
    try:
        count = sum(1 for _ in stream_records(path))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 20_000 and peak < 10_000_000 * 0.75, "ten megabytes of text, of which a part is held"


def test_an_xz_file_of_several_streams_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.xz"
    streams = lzma.compress(b'{"a": 1}\n') + b"\0" * 8 + lzma.compress(b'{"a": 2}\n') + b"\0" * 4
    path.write_bytes(streams)
    assert [record.value for record in streamed(path)] == [{"a": 1}, {"a": 2}]
    path.write_bytes(streams + b"junk")
    with pytest.raises(DataError, match="is not a whole xz file"):
        streamed(path)


def test_rows_in_chunks_are_the_rows_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The format and the columns are those of the first chunk; later ones need not have all of them."""
    monkeypatch.setattr(formats, "CHUNK_RECORDS", 1000)
    rows = [{"q": f"{i}?", "good": "a", "bad": "b", "margin": 1} for i in range(1500)]
    rows += [{"q": f"{i}?", "good": "a"} for i in range(1500, 2600)]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    columns = {"prompt": "q", "chosen": "good", "rejected": "bad"}
    (file,) = source_files([DataSource(path="x.jsonl", columns=columns)], tmp_path)
    chunks = list(source_chunks(file, "preferences"))
    assert [chunk.counts.records for chunk in chunks] == [1000, 1000, 600]
    assert [position for chunk in chunks for position in chunk.positions] == list(range(1, 1501))
    assert [row["prompt"][0]["content"] for row in chunks[1].rows] == [f"{i}?" for i in range(1000, 1500)]
    assert [row.position for chunk in chunks for row in chunk.refused] == list(range(1501, 2601))


def test_a_file_that_grows_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    """What a dictionary expands to is seen only when rows are read; rows of a usual length are read by the thousand."""
    pq.write_table(pa.table({"a": ["x" * 1000] * 3000}), tmp_path / "repeated.parquet")
    pq.write_table(pa.table({"a": [f"{n} " * 20 for n in range(3000)]}), tmp_path / "usual.parquet")
    sizes = []
    for name in ("repeated", "usual"):
        with pq.ParquetFile(tmp_path / f"{name}.parquet") as file:
            sizes.append([batch.num_rows for batch in parquet_tables(name, file, 10**6)])
    assert sizes == [[64] * 46 + [56], [2048, 952]]


@pytest.mark.parametrize(
    "column",
    [pa.nulls(3_000_000), pa.nulls(3_000_000, pa.string()), pa.repeat("a", 3_000_000), pa.array(["a" * 70_000_000])],
    ids=["nulls", "missing-texts", "one-letter", "one-long-text"],
)
def test_a_table_of_far_more_than_its_file_could_hold_is_refused_before_it_is_read(
    column: pa.Array, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table({"a": column}), tmp_path / "x.parquet", compression="zstd")
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda *_: pytest.fail("it is read"))
    with pytest.raises(DataError, match="more than 200 times its size"):
        next(stream_records(tmp_path / "x.parquet"))


def test_an_arrow_batch_of_nothing_is_refused(tmp_path: Path) -> None:
    table = pa.table({"a": pa.nulls(10**9)})
    with pa.OSFile(str(tmp_path / "x.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(DataError, match="more than 200 times its size"):
        next(stream_records(tmp_path / "x.arrow"))


def test_messages_of_a_tree_may_be_in_different_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "CHUNK_RECORDS", 2)
    question = {"message_id": "q", "parent_id": None, "role": "prompter", "text": "Why?"}
    replies = [
        {"message_id": f"a{rank}", "parent_id": "q", "role": "assistant", "text": f"reply {rank}", "rank": rank}
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


def arrow_stream(rows: range) -> bytes:
    return arrow(pa.table({"prompt": [f"{i:0900}" for i in rows]}), stream=True, batch=50)


def test_two_arrow_streams_in_a_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.arrow"
    path.write_bytes(arrow_stream(range(4)) + arrow_stream(range(4)))
    with pytest.raises(DataError, match="follow the end of its stream"):
        streamed(path)


def test_an_arrow_file_that_shrinks_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.arrow"
    path.write_bytes(arrow_stream(range(1000)))
    records = stream_records(path)
    next(records)
    os.truncate(path, 100_000)
    with pytest.raises(DataError, match="not a readable arrow file"):
        list(records)


def not_utf8_files() -> dict[str, tuple[str, bytes, int]]:
    """Lists of rows in bytes that are not UTF-8 at one place: the name of the file, its content and that place."""
    row = '{"prompt": "天气？", "chosen": "a", "rejected": "b"},\n'.encode()
    begin = b"[\n" + row * (2**21 // len(row))
    bad = b'{"prompt": "caf\xe9"},\n'
    end = row * 3 + b'{"prompt": "x"}]'
    mark = b"\xef\xbb\xbf"
    cut = b'[\n{"prompt": "\xe5\xa4'
    return {
        "late": ("x.json", begin + bad + end, len(begin) + 15),
        "first": ("x.json", b"[" + bad + end, 16),
        "behind-a-byte-order-mark": ("x.json", mark + begin + bad + end, len(mark + begin) + 15),
        "cut-off-inside-a-character": ("x.json", cut, len(cut) - 2),
        "in-gzip": ("x.json.gz", gzip.compress(begin + bad + end), len(begin) + 15),
    }


@pytest.mark.slow
@pytest.mark.parametrize("case", not_utf8_files())
def test_bytes_of_json_that_are_not_utf8_are_named_by_line_and_place(case: str, tmp_path: Path) -> None:
    name, content, place = not_utf8_files()[case]
    path = tmp_path / name
    path.write_bytes(content)
    plain = gzip.decompress(content) if name.endswith(".gz") else content
    line = plain[:place].count(b"\n") + 1
    expected = f"line {line}, is not UTF-8 (byte 0x{plain[place]:02x}, {place} bytes from the start"
    with pytest.raises(DataError) as refused:
        streamed(path)
    assert f"{path}, {expected} of the file); save it as UTF-8" == str(refused.value)


def test_every_place_between_two_chunks_is_counted_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = '[\n"天",\n"天",\n"'.encode() + b'\xff"]'
    path = tmp_path / "x.json"
    path.write_bytes(content)
    for size in range(4, len(content) + 1):
        monkeypatch.setattr("rlhf_core.data.readers.json_records.CHUNK", size)
        with pytest.raises(DataError, match=rf"line 4, is not UTF-8 \(byte 0xff, {len(content) - 3} bytes from the"):
            list(stream_records(path))


def test_a_full_disk_is_no_fault_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compressed table is unpacked into a temporary file, here on a device that is always full."""
    pq.write_table(pa.table({"prompt": ["a?"]}), tmp_path / "x.parquet")
    packed = tmp_path / "x.parquet.gz"
    packed.write_bytes(gzip.compress((tmp_path / "x.parquet").read_bytes()))
    message = r"cannot unpack .*x\.parquet\.gz into .*: No space left on device; make room"
    with open("/dev/full", "wb", buffering=0) as full, pytest.raises(DataError, match=message):
        monkeypatch.setattr("tempfile.NamedTemporaryFile", lambda prefix: full)
        list(stream_records(packed))
