"""Read records one after the other where the kind of file allows it: JSON lines, CSV and parquet files of any size."""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_core.data.readers.compression import COMPRESSIONS, expansion_limit, too_large
from rlhf_core.data.readers.containers import (
    Record,
    csv_records,
    json_line_records,
    kind_of,
    load_records,
    no_rows,
    parquet_batches,
    table_records,
)
from rlhf_core.data.readers.foreign_content import HEAD, require_content, require_text
from rlhf_core.errors import DataError

STREAMED_TEXT = (".jsonl", ".ndjson", ".csv", ".tsv")
STREAMED_COMPRESSIONS = ("", ".gz", ".zst")
# Told how many more bytes of a file were read.
OnRead = Callable[[int], None]


class CountedFile(io.FileIO):
    """A file that reports how much of it is read."""

    def __init__(self, path: Path, on_read: OnRead) -> None:
        super().__init__(path)
        self._on_read = on_read

    def readinto(self, buffer: object) -> int | None:
        """Read into ``buffer`` and report the number of bytes."""
        count = super().readinto(buffer)  # type: ignore[arg-type]
        self._on_read(count or 0)
        return count


class Decompressed(io.RawIOBase):
    """A decompressed stream that must not expand beyond measure; see :func:`expansion_limit`."""

    def __init__(self, name: str, stream: BinaryIO, limit: int) -> None:
        self._name, self._stream, self._left = name, stream, limit

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Read into ``buffer``; ``DataError`` for more bytes than are allowed."""
        content = self._stream.read(len(buffer))
        buffer[: len(content)] = content
        self._left -= len(content)
        if self._left < 0:
            raise too_large(self._name)
        return len(content)


def stream_records(path: Path, on_read: OnRead) -> Iterator[Record]:
    """Yield every record of a file as ``load_records`` reads them. Lists of JSON and arrow files are read whole.

    Raises:
        DataError: The file is missing, empty, not what its name says, or of no known kind.
    """
    kind, compression = kind_of(str(path))
    records: Iterator[Record] | None = None
    if kind in STREAMED_TEXT and compression in STREAMED_COMPRESSIONS and path.is_file():
        records = _text_records(path, kind, compression, on_read)
    elif kind == ".parquet" and not compression and path.is_file():
        records = _parquet_records(path, on_read)
    if records is None:
        yield from load_records(path)
        on_read(path.stat().st_size)
        return
    record: Record | None = None
    for record in records:
        yield record
    if record is None:
        raise no_rows(str(path))


def _text_records(path: Path, kind: str, compression: str, on_read: OnRead) -> Iterator[Record]:
    name = str(path)
    try:
        head = _head(path, compression)
        if head and not head.isspace():
            require_content(name, head)
            require_text(name, head)
        with io.BufferedReader(CountedFile(path, on_read)) as file:
            stream = _decompressing(name, file, compression)
            if kind in (".csv", ".tsv"):
                yield from csv_records(name, stream, "," if kind == ".csv" else "\t")
            else:
                yield from json_line_records(name, stream)
    except (EOFError, OSError, zlib.error, pa.ArrowException) as error:
        if not compression:
            raise DataError(f"cannot read {path}: {error}") from error
        raise DataError(
            f"{path} is not a whole {COMPRESSIONS[compression]} file ({error}); copy or download it again"
        ) from error


def _head(path: Path, compression: str) -> bytes:
    """Return the first bytes of the content."""
    with path.open("rb") as file:
        return _decompressing(str(path), file, compression).read(HEAD)


def _decompressing(name: str, file: io.BufferedReader[Any], compression: str) -> io.BufferedReader[Any]:
    if not compression or not file.peek(1):
        return file
    limit = expansion_limit(os.fstat(file.fileno()).st_size)
    if compression == ".gz":
        stream = cast(BinaryIO, gzip.GzipFile(fileobj=file))
    else:
        stream = cast(BinaryIO, pa.CompressedInputStream(pa.PythonFile(file, "r"), "zstd"))
    return io.BufferedReader(Decompressed(name, stream, limit))


def _parquet_records(path: Path, on_read: OnRead) -> Iterator[Record]:
    size, rows = path.stat().st_size, 0
    try:
        with path.open("rb") as begin:
            require_content(str(path), begin.read(HEAD))
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            total = file.metadata.num_rows
            for batch in parquet_batches(str(path), file, size):
                yield from table_records(pa.Table.from_batches([batch]), first=rows + 1)
                on_read(size * (rows + batch.num_rows) // total - size * rows // total)
                rows += batch.num_rows
    except (pa.ArrowException, OSError, ValueError) as error:  # ValueError: names that are not UTF-8
        raise DataError(f"{path} is not a readable parquet file ({error})") from error
