"""Files that are cut off, damaged, compressed twice or named after another kind."""

from __future__ import annotations

import gzip
import io
import lzma
import zipfile
from pathlib import Path

import pyarrow as pa
from unit.data.malformed.case import OddFile, RowsRead, arrow, lines, pairs, parquet, table_text


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
WHOLE_GZIP, WHOLE_ZSTD, WHOLE_XZ = (f"is not a whole {name} file" for name in ("gzip", "zstd", "xz"))
PACK = {".gz": gzip.compress, ".zst": zstd, ".xz": lambda content: lzma.compress(content, preset=0)}


def cut(label: str, suffix: str, keep: float | int, message: str) -> OddFile:
    """Return a compressed file of which only a share, or all but some last bytes, is left."""
    whole = PACK[suffix](lines(*pairs(label, 200)))
    return OddFile(label, f".jsonl{suffix}", whole[: int(len(whole) * keep) if keep > 0 else int(keep)], 200, message)


def members(label: str, suffix: str) -> OddFile:
    """Return a file of two compressed parts one after the other, as ``cat`` makes it: both count."""
    rows = pairs(label, 4)
    content = b"".join(PACK[suffix](lines(*part)) for part in (rows[:2], rows[2:]))
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


def misnamed(label: str, suffix: str, content: bytes, message: str) -> OddFile:
    return OddFile(label, suffix, content, 2, message)


ROWS = pairs("compressed")
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"
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
    misnamed("gz-twice-named", ".jsonl.gz.gz", gzip.compress(gzip.compress(lines(*ROWS))), "kind of file '.gz'"),
    misnamed("gz-twice", ".jsonl.gz", gzip.compress(gzip.compress(lines(*ROWS))), "is gzip by its content"),
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
    misnamed("web-page", ".jsonl", b"<!DOCTYPE html>\n<html><body>Sign in</body></html>\n", "is a web page"),
    misnamed("web-page-csv", ".csv", b"<html>\n<body>404</body></html>\n", "is a web page"),
    misnamed("lfs-pointer", ".parquet", LFS_POINTER, "is a pointer of Git LFS"),
    bomb("gz-bomb", ".jsonl", ".gz"),
    bomb("zst-bomb", ".csv", ".zst"),
    OddFile("gz-empty", ".jsonl.gz", gzip.compress(b""), 0, "is empty"),
    OddFile("gz-of-nothing", ".jsonl.gz", b"", 0, "is empty"),
    OddFile("capital-suffix", ".JSONL", lines(*pairs("capital-suffix")), 2, RowsRead(2)),
]
