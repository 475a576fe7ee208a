"""Read records one after the other where the kind of file allows it: JSON lines, CSV and parquet files of any size."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_core.data.readers.compression import COMPRESSIONS
from rlhf_core.data.readers.containers import (
    Record,
    csv_records,
    json_line_records,
    kind_of,
    load_records,
    require_distinct,
    table_records,
)
from rlhf_core.errors import DataError

STREAMED_TEXT = (".jsonl", ".ndjson", ".csv", ".tsv")
STREAMED_COMPRESSIONS = ("", ".gz", ".zst")
PARQUET_ROWS = 2048
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


def stream_records(path: Path, on_read: OnRead) -> Iterator[Record]:
    """Yield every record of a file as ``load_records`` reads them. Lists of JSON and arrow files are read whole.

    Raises:
        DataError: The file is missing, empty, not what its name says, or of no known kind.
    """
    kind, compression = kind_of(str(path))
    if kind in STREAMED_TEXT and compression in STREAMED_COMPRESSIONS and path.is_file():
        yield from _text_records(path, kind, compression, on_read)
    elif kind == ".parquet" and not compression and path.is_file():
        yield from _parquet_records(path, on_read)
    else:
        yield from load_records(path)
        on_read(path.stat().st_size)


def _text_records(path: Path, kind: str, compression: str, on_read: OnRead) -> Iterator[Record]:
    try:
        file: io.BufferedReader = io.BufferedReader(CountedFile(path, on_read))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    with file:
        records = 0
        try:
            stream = _decompressing(file, compression)
            rows = csv_records(str(path), stream, "," if kind == ".csv" else "\t")
            for record in rows if kind in (".csv", ".tsv") else json_line_records(stream):
                records += 1
                yield record
        except (EOFError, OSError, zlib.error, pa.ArrowException) as error:
            if not compression:
                raise DataError(f"cannot read {path}: {error}") from error
            raise DataError(
                f"{path} is not a whole {COMPRESSIONS[compression]} file ({error}); copy or download it again"
            ) from error
        if not records:
            raise DataError(f"{path} is empty; give a file with rows, or take it out of the sources")


def _decompressing(file: io.BufferedReader, compression: str) -> io.BufferedReader:
    if compression == ".gz" and file.peek(1):
        return io.BufferedReader(cast(io.RawIOBase, gzip.GzipFile(fileobj=file)))
    if compression == ".zst" and file.peek(1):
        return io.BufferedReader(cast(io.RawIOBase, pa.CompressedInputStream(pa.PythonFile(file, "r"), "zstd")))
    return file


def _parquet_records(path: Path, on_read: OnRead) -> Iterator[Record]:
    size, rows = path.stat().st_size, 0
    try:
        with pq.ParquetFile(path) as file:
            require_distinct(str(path), file.schema_arrow.names)
            total = file.metadata.num_rows
            for batch in file.iter_batches(PARQUET_ROWS):
                yield from table_records(pa.Table.from_batches([batch]), first=rows + 1)
                on_read(size * (rows + batch.num_rows) // total - size * rows // total)
                rows += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable parquet file ({error})") from error
    if not rows:
        raise DataError(f"{path} is empty; give a file with rows, or take it out of the sources")
