"""Compressed, cut-off, damaged and misnamed files; parquet and Arrow tables of odd columns."""

from __future__ import annotations

import datetime
import decimal
import gzip
import io
import lzma
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
from unit.data.malformed.case import (
    OddFile,
    RowsRead,
    arrow,
    lines,
    pairs,
    parquet,
    quarantined,
    table_text,
)


def zstd(content: bytes) -> bytes:
    return pa.compress(content, codec="zstd", asbytes=True)


def flipped(content: bytes, position: int) -> bytes:
    """Return ``content`` with all bits of one byte inverted."""
    changed = bytearray(content)
    changed[position] ^= 0xFF
    return bytes(changed)


def zipped(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("pairs.jsonl", content)
    return buffer.getvalue()


BOMB_SIZE = 65 * 2**20
WHOLE_GZIP, WHOLE_ZSTD, WHOLE_XZ = (
    f"is not a whole {name} file" for name in ("gzip", "zstd", "xz")
)
PACK = {".gz": gzip.compress, ".zst": zstd, ".xz": lambda content: lzma.compress(content, preset=0)}


def cut(label: str, suffix: str, keep: float | int, message: str) -> OddFile:
    """Return a compressed file of which only a share, or all but some last bytes, is left."""
    whole = PACK[suffix](lines(*pairs(label, 200)))
    return OddFile(
        label,
        f".jsonl{suffix}",
        whole[: int(len(whole) * keep) if keep > 0 else int(keep)],
        200,
        message,
    )


def members(label: str, suffix: str) -> OddFile:
    """Return a file of two compressed parts one after the other, as ``cat`` makes it: both count.
    xz may pad each.
    """
    rows = pairs(label, 4)
    content = b"".join(
        PACK[suffix](lines(*part)) + bytes(8) * (suffix == ".xz") for part in (rows[:2], rows[2:])
    )
    return OddFile(label, f".jsonl{suffix}", content, 4, RowsRead(4))


def trailing(label: str, suffix: str, message: str) -> OddFile:
    """Return a compressed file with other bytes behind it."""
    content = PACK[suffix](lines(*pairs(label))) + b"other bytes behind the end"
    return OddFile(label, f".jsonl{suffix}", content, 2, message)


def bomb(label: str, suffix: str, compression: str) -> OddFile:
    """Return a small file that expands to more than is read of any file so small."""

    def write(path: Path) -> None:
        path.write_bytes(PACK[compression](b" " * BOMB_SIZE))

    return OddFile(label, f"{suffix}{compression}", write, 0, "times its size")


def of_holes(label: str, suffix: str, begin: bytes, end: bytes, message: str) -> OddFile:
    """Return a large file that takes no room on a disk: its middle was never written."""

    def write(path: Path) -> None:
        with path.open("wb") as file:
            file.write(begin)
            file.seek(BOMB_SIZE)
            file.write(end)

    return OddFile(label, suffix, write, 0, message)


def misnamed(label: str, suffix: str, content: bytes, message: str) -> OddFile:
    return OddFile(label, suffix, content, 2, message)


ROWS = pairs("compressed")
LFS_POINTER = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"
)
FILES = [
    *(cut(f"gz-cut-{keep}", ".gz", keep, WHOLE_GZIP) for keep in (0.5, 0.02, -1, -9)),
    *(cut(f"zst-cut-{keep}", ".zst", keep, WHOLE_ZSTD) for keep in (0.5, 0.02, -1, -9)),
    *(cut(f"xz-cut-{keep}", ".xz", keep, WHOLE_XZ) for keep in (0.5, 0.02, -1, -9)),
    members("gz-members", ".gz"),
    members("zst-frames", ".zst"),
    members("xz-streams", ".xz"),
    trailing("gz-trailing", ".gz", WHOLE_GZIP),
    trailing("zst-trailing", ".zst", WHOLE_ZSTD),
    trailing("xz-trailing", ".xz", WHOLE_XZ),
    misnamed("gz-checksum", ".jsonl.gz", flipped(gzip.compress(lines(*ROWS)), -6), WHOLE_GZIP),
    misnamed("xz-damaged", ".jsonl.xz", flipped(lzma.compress(lines(*ROWS)), 40), WHOLE_XZ),
    misnamed("gz-plain", ".jsonl.gz", lines(*ROWS), WHOLE_GZIP),
    misnamed("gz-is-zst", ".jsonl.gz", zstd(lines(*ROWS)), WHOLE_GZIP),
    misnamed(
        "gz-twice-named",
        ".jsonl.gz.gz",
        gzip.compress(gzip.compress(lines(*ROWS))),
        "kind of file '.gz'",
    ),
    misnamed(
        "gz-twice",
        ".jsonl.gz",
        gzip.compress(gzip.compress(lines(*ROWS))),
        "is gzip by its content",
    ),
    misnamed("gz-unnamed", ".jsonl", gzip.compress(lines(*ROWS)), "is gzip by its content"),
    misnamed("zst-unnamed", ".json", zstd(lines(*ROWS)), "is zstd by its content"),
    misnamed("xz-unnamed", ".csv", lzma.compress(table_text(ROWS)), "is xz by its content"),
    misnamed("zip-unnamed", ".csv", zipped(table_text(ROWS)), "is a zip archive"),
    misnamed("parquet-as-jsonl", ".jsonl", parquet(ROWS), "is parquet by its content"),
    misnamed("parquet-as-csv", ".csv", parquet(ROWS), "is parquet by its content"),
    misnamed("arrow-as-json", ".json", arrow(ROWS), "is arrow by its content"),
    misnamed("jsonl-as-parquet", ".parquet", lines(*ROWS), "is not a readable parquet file"),
    misnamed("jsonl-as-arrow", ".arrow", lines(*ROWS), "is not a readable arrow file"),
    misnamed("arrow-as-parquet", ".parquet", arrow(ROWS), "is not a readable parquet file"),
    misnamed("parquet-as-arrow", ".arrow", parquet(ROWS), "is not a readable arrow file"),
    misnamed("csv-as-json", ".json", table_text(ROWS), "is not valid JSON"),
    misnamed("csv-as-jsonl", ".jsonl", table_text(ROWS), "the line is not valid JSON"),
    misnamed("jsonl-as-csv", ".csv", lines(*ROWS), "is of no known format"),
    misnamed(
        "web-page",
        ".jsonl",
        b"<!DOCTYPE html>\n<html><body>Sign in</body></html>\n",
        "is a web page",
    ),
    misnamed("web-page-csv", ".csv", b"<html>\n<body>404</body></html>\n", "is a web page"),
    misnamed("lfs-pointer", ".parquet", LFS_POINTER, "is a pointer of Git LFS"),
    bomb("gz-bomb", ".jsonl", ".gz"),
    of_holes("csv-holes", ".csv", b"prompt,chosen,rejected\n", b"\n", "line 2, is longer than 64"),
    of_holes("csv-header-of-holes", ".csv", b"prompt,chosen", b"\n", "line 1, is longer than 64"),
    of_holes("tsv-holes", ".tsv", b"prompt\tchosen\trejected\na", b"\n", "is longer than 64"),
    of_holes("jsonl-holes", ".jsonl", b'{"prompt":"', b'"}\n', "line 1, is longer than 64"),
    of_holes("parquet-holes", ".parquet", b"PAR1", b"PAR1", "is not a readable parquet file"),
    bomb("zst-bomb", ".csv", ".zst"),
    OddFile("gz-empty", ".jsonl.gz", gzip.compress(b""), 0, "is empty"),
    OddFile("gz-of-nothing", ".jsonl.gz", b"", 0, "is empty"),
    OddFile("capital-suffix", ".JSONL", lines(*pairs("capital-suffix")), 2, RowsRead(2)),
]


def column(
    label: str, name: str, values: pa.Array, expected: str | RowsRead, suffix: str = ".parquet"
) -> OddFile:
    """Return a table of good pairs in which one column is replaced or added."""
    rows = pairs(label, len(values))
    columns: dict[str, Any] = {key: pa.array([row[key] for row in rows]) for key in rows[0]} | {
        name: values
    }
    table = pa.table(columns)
    return OddFile(
        label,
        suffix,
        parquet(table) if suffix == ".parquet" else arrow(table),
        len(values),
        expected,
    )


def invalid_utf8(*texts: bytes) -> pa.Array:
    return pa.Array.from_buffers(pa.string(), len(texts), pa.array(texts, pa.binary()).buffers())


def repeated(names: list[str]) -> pa.Table:
    return pa.table([pa.array([f"repeated {n}"]) for n in range(len(names))], names=names)


def recounted(footer: int, group: int) -> bytes:
    """Return a parquet file of 300 rows whose footer and row group count other numbers.

    The numbers are zigzag varints of Thrift: 300 is ``d8 04``, as the number of rows after the
    schema's last column (field 3 of the footer, ``16``) and of the row group (field 3 there,
    ``16``).
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
    return pa.table(
        {
            "prompt": prompts,
            "chosen": pa.array(["a", "b", "c"]),
            "rejected": pa.array(["d", "e", "f"]),
        }
    )


LONG = "x" * 150_000
REPEATED = {
    "prompt": [f"{n % 2}{LONG}" for n in range(1000)],
    "chosen": ["a"] * 1000,
    "rejected": ["b"] * 1000,
}
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
FILES += [
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
    OddFile(
        "parquet-no-rows", ".parquet", parquet(pa.table({"prompt": pa.nulls(0)})), 0, "is empty"
    ),
    OddFile("parquet-joined", ".parquet", WHOLE + WHOLE, 600, "several parquet files were joined"),
    OddFile(
        "parquet-joined-indexed", ".parquet", 2 * INDEXED, 600, "several parquet files were joined"
    ),
    OddFile(
        "parquet-indexed",
        ".parquet",
        parquet(pairs("PAR1", 3), write_page_index=True),
        3,
        RowsRead(3),
    ),
    OddFile("arrow-no-rows", ".arrow", arrow(pa.table({"prompt": pa.nulls(0)})), 0, "is empty"),
    OddFile(
        "parquet-two-of-a-name",
        ".parquet",
        parquet(repeated(["prompt", "a", "a"])),
        1,
        "names 'a' twice",
    ),
    OddFile(
        "arrow-two-of-a-name", ".arrow", arrow(repeated(["prompt", "a", "a"])), 1, "names 'a' twice"
    ),
    column(
        "bytes-replies",
        "chosen",
        pa.array([b"a", b"b"]),
        RowsRead(0, {"chosen is not text but bytes": 2}),
    ),
    column("bytes-prompts", "prompt", pa.array([b"a b", b"c d"]), "prompt (bytes)"),
    column("bytes-column", "digest", pa.array([b"\xff", b"b"]), RowsRead(2, unused=["digest"])),
    column("bad-utf8", "rejected", NOT_UTF8, RowsRead(2, {"rejected cannot be read": 1})),
    column(
        "bad-utf8-arrow",
        "rejected",
        NOT_UTF8,
        RowsRead(2, {"rejected cannot be read": 1}),
        ".arrow",
    ),
    column("late-timestamp", "when", pa.array([0, 2**62], pa.timestamp("ms")), TOO_LATE),
    column("good-timestamp", "when", pa.array([AWARE, None]), RowsRead(2, unused=["when"])),
    column(
        "unknown-time-zone",
        "when",
        pa.array([0, 1], pa.timestamp("ms", "No/Where")),
        "when cannot be read",
    ),
    column(
        "nanoseconds", "when", pa.array([1, 2], pa.timestamp("ns")), RowsRead(2, unused=["when"])
    ),
    column("late-date", "when", pa.array([0, 2**30], pa.date32()), TOO_LATE),
    column("decimal-margin", "margin", pa.array([decimal.Decimal("0.5"), None]), RowsRead(2)),
    column(
        "nan-margin", "margin", pa.array([float("nan"), 1.0]), quarantined(2, "not a finite number")
    ),
    column(
        "boolean-margin", "margin", pa.array([True, False]), RowsRead(0, {"is not a number": 2})
    ),
    column("half-margin", "margin", pa.array([0.5, 1.0], pa.float16()), RowsRead(2)),
    column(
        "dictionary-text", "chosen", pa.array(["good a", "good b"]).dictionary_encode(), RowsRead(2)
    ),
    column("large-text", "chosen", pa.array(["good a", "good b"], pa.large_string()), RowsRead(2)),
    column(
        "text-views",
        "chosen",
        pa.array(["good a", "good b"], pa.string_view()),
        RowsRead(2),
        ".arrow",
    ),
    column(
        "map-column",
        "tags",
        pa.array([[("a", 1)], []], pa.map_("str", "i1")),
        RowsRead(2, unused=["tags"]),
    ),
    column("null-column", "note", pa.nulls(2), RowsRead(2)),
    column(
        "struct-prompt", "prompt", pa.array([{"role": "user", "content": "a"}] * 2), "prompt (dict)"
    ),
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
    OddFile("parquet-bomb", ".parquet", parquet(pa.table(REPEATED)), 1000, "made to do harm"),
    OddFile(
        "arrow-bomb",
        ".arrow",
        arrow(pa.table(ENCODED)),
        1000,
        "values of more than 200 times its size",
    ),
    OddFile(
        "arrow-of-nothing",
        ".arrow",
        arrow(pa.table({"a": pa.nulls(10**9)})),
        0,
        "more than 200 times its size",
    ),
    OddFile("arrow-streams-joined", ".arrow", STREAM + STREAM, 600, "follow the end of its stream"),
    column(
        "repeated-text",
        "system",
        pa.array(["be brief " * 100] * 400).dictionary_encode(),
        RowsRead(400),
    ),
]
