"""Parquet and Arrow files: cut off, without rows, with columns of other types, with values that Python has none of."""

from __future__ import annotations

import datetime
import decimal
from typing import Any

import pyarrow as pa
from unit.data.malformed.case import OddFile, RowsRead, arrow, pairs, parquet, quarantined


def column(label: str, name: str, values: pa.Array, expected: str | RowsRead, suffix: str = ".parquet") -> OddFile:
    """Return a table of good pairs in which one column is replaced or added."""
    rows = pairs(label, len(values))
    columns: dict[str, Any] = {key: pa.array([row[key] for row in rows]) for key in rows[0]} | {name: values}
    table = pa.table(columns)
    return OddFile(label, suffix, parquet(table) if suffix == ".parquet" else arrow(table), len(values), expected)


def invalid_utf8(*texts: bytes) -> pa.Array:
    return pa.Array.from_buffers(pa.string(), len(texts), pa.array(texts, pa.binary()).buffers())


def repeated(names: list[str]) -> pa.Table:
    return pa.table([pa.array([f"repeated {n}"]) for n in range(len(names))], names=names)


def recounted(footer: int, group: int) -> bytes:
    """Return a parquet file of 300 rows whose footer and row group count other numbers.

    The numbers are zigzag varints of Thrift: 300 is ``d8 04``, as the number of rows after the schema's last column
    (field 3 of the footer, ``16``) and of the row group (field 3 there, ``16``).
    """
    content = parquet(BIG)
    end = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    start, tail = content[:end], content[end:]
    assert tail.count(b"\x16" + varint(300)) >= 2
    first = tail.index(b"\x16" + varint(300)) + 1
    tail = tail[:first] + varint(footer) + tail[first + 2 :]
    last = tail.rindex(b"\x16" + varint(300)) + 1
    tail = tail[:last] + varint(group) + tail[last + 2 :]
    return start + tail[:-8] + (len(tail) - 8).to_bytes(4, "little") + tail[-4:]


def varint(number: int) -> bytes:
    """Return a number as two bytes of Thrift's compact protocol."""
    zigzag = number * 2
    return bytes([zigzag & 0x7F | 0x80, zigzag >> 7])


def bad_turns(label: str) -> pa.Table:
    """Return three pairs, of which the second has a prompt that is not UTF-8."""
    contents = invalid_utf8(f"{label} a?".encode(), b"\xff", f"{label} c?".encode())
    turns = pa.StructArray.from_arrays([pa.array(["user"] * 3), contents], ["role", "content"])
    prompts = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), turns)
    return pa.table({"prompt": prompts, "chosen": pa.array(["a", "b", "c"]), "rejected": pa.array(["d", "e", "f"])})


LONG = "x" * 150_000
REPEATED = {"prompt": [f"{n % 2}{LONG}" for n in range(1000)], "chosen": ["a"] * 1000, "rejected": ["b"] * 1000}
BIG = pairs("table", 300)
WHOLE = parquet(BIG)
STREAM = arrow(pairs("stream", 300), stream=True, batch=100)
ARROW = arrow(pairs("arrow", 300), batch=100)
NOT_PARQUET, NOT_ARROW = "is not a readable parquet file", "is not a readable arrow file"
AWARE = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
NOT_UTF8 = invalid_utf8(b"x", b"\xff\xfe", b"z")
TOO_LATE = RowsRead(1, {"the column when cannot be read": 1}, unused=["when"])
BAD_PROMPT = RowsRead(2, {"the column prompt cannot be read": 1})
INDEXED = parquet(BIG, write_page_index=True, row_group_size=100)
ENCODED = {name: pa.array(texts).dictionary_encode() for name, texts in REPEATED.items()}
FILES = [
    *(
        OddFile(f"parquet-cut-{keep}", ".parquet", WHOLE[:keep], 300, NOT_PARQUET)
        for keep in (4, len(WHOLE) // 2, len(WHOLE) - 1, len(WHOLE) - 9)
    ),
    *(
        OddFile(f"arrow-cut-{keep}", ".arrow", ARROW[:keep], 300, NOT_ARROW)
        for keep in (8, len(ARROW) // 2, len(ARROW) - 1)
    ),
    *(
        OddFile(f"stream-cut-{keep}", ".arrow", STREAM[:keep], 300, NOT_ARROW)
        for keep in (10, len(STREAM) // 2, len(STREAM) - 8)
    ),
    OddFile("parquet-no-rows", ".parquet", parquet(pa.table({"prompt": pa.nulls(0)})), 0, "is empty"),
    OddFile("parquet-joined", ".parquet", WHOLE + WHOLE, 600, "several parquet files were joined"),
    OddFile("parquet-joined-indexed", ".parquet", 2 * INDEXED, 600, "several parquet files were joined"),
    OddFile("parquet-indexed", ".parquet", parquet(pairs("PAR1", 3), write_page_index=True), 3, RowsRead(3)),
    OddFile("arrow-no-rows", ".arrow", arrow(pa.table({"prompt": pa.nulls(0)})), 0, "is empty"),
    OddFile("parquet-two-of-a-name", ".parquet", parquet(repeated(["prompt", "a", "a"])), 1, "names 'a' twice"),
    OddFile("arrow-two-of-a-name", ".arrow", arrow(repeated(["prompt", "a", "a"])), 1, "names 'a' twice"),
    column("bytes-replies", "chosen", pa.array([b"a", b"b"]), RowsRead(0, {"chosen is not text but bytes": 2})),
    column("bytes-prompts", "prompt", pa.array([b"a b", b"c d"]), "prompt (bytes)"),
    column("bytes-column", "digest", pa.array([b"\xff", b"b"]), RowsRead(2, unused=["digest"])),
    column("bad-utf8", "rejected", NOT_UTF8, RowsRead(2, {"rejected cannot be read": 1})),
    column("bad-utf8-arrow", "rejected", NOT_UTF8, RowsRead(2, {"rejected cannot be read": 1}), ".arrow"),
    column("late-timestamp", "when", pa.array([0, 2**62], pa.timestamp("ms")), TOO_LATE),
    column("good-timestamp", "when", pa.array([AWARE, None]), RowsRead(2, unused=["when"])),
    column("unknown-time-zone", "when", pa.array([0, 1], pa.timestamp("ms", "No/Where")), "when cannot be read"),
    column("nanoseconds", "when", pa.array([1, 2], pa.timestamp("ns")), RowsRead(2, unused=["when"])),
    column("late-date", "when", pa.array([0, 2**30], pa.date32()), TOO_LATE),
    column("decimal-margin", "margin", pa.array([decimal.Decimal("0.5"), None]), RowsRead(2)),
    column("nan-margin", "margin", pa.array([float("nan"), 1.0]), quarantined(2, "not a finite number")),
    column("boolean-margin", "margin", pa.array([True, False]), RowsRead(0, {"is not a number": 2})),
    column("half-margin", "margin", pa.array([0.5, 1.0], pa.float16()), RowsRead(2)),
    column("dictionary-text", "chosen", pa.array(["good a", "good b"]).dictionary_encode(), RowsRead(2)),
    column("large-text", "chosen", pa.array(["good a", "good b"], pa.large_string()), RowsRead(2)),
    column("text-views", "chosen", pa.array(["good a", "good b"], pa.string_view()), RowsRead(2), ".arrow"),
    column("map-column", "tags", pa.array([[("a", 1)], []], pa.map_("str", "i1")), RowsRead(2, unused=["tags"])),
    column("null-column", "note", pa.nulls(2), RowsRead(2)),
    column("struct-prompt", "prompt", pa.array([{"role": "user", "content": "a"}] * 2), "prompt (dict)"),
    OddFile("nested-bad-utf8", ".parquet", parquet(bad_turns("parquet")), 3, BAD_PROMPT),
    OddFile("nested-bad-utf8-arrow", ".arrow", arrow(bad_turns("arrow")), 3, BAD_PROMPT),
    *(
        OddFile(f"parquet-counts-{label}", ".parquet", recounted(*change), 300, message)
        for label, change, message in (
            ("footer-less", (299, 300), "its footer counts 299 rows, its row groups 300"),
            ("footer-none", (0, 300), "its footer counts 0 rows, its row groups 300"),
            ("group-less", (300, 299), "its footer counts 300 rows, its row groups 299"),
            ("both-less", (299, 299), "has 300 values in a group of 299 rows"),
            ("both-more", (301, 301), "has 300 values in a group of 301 rows"),
        )
    ),
    OddFile("parquet-bomb", ".parquet", parquet(pa.table(REPEATED)), 1000, "values of more than 200 times its size"),
    OddFile("arrow-bomb", ".arrow", arrow(pa.table(ENCODED)), 1000, "values of more than 200 times its size"),
    column("repeated-text", "system", pa.array(["be brief " * 100] * 400).dictionary_encode(), RowsRead(400)),
]
