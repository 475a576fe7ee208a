"""Read the rows of parquet and Arrow files some thousand at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_core.data.chunks import table_slices
from rlhf_core.data.readers.containers.records import (
    END_OF_STREAM,
    Record,
    parquet_batches,
    require_consistent,
    require_distinct,
    require_end,
    table_records,
)
from rlhf_core.data.readers.containers.table_checks import BATCH_ROWS, DecodedSize, require_one_file
from rlhf_core.errors import DataError

ARROW_FILE = b"ARROW1"
# Of a column at a time: otherwise the whole column of a row group is read, and with pre_buffer all of them are kept.
READ_BYTES = 2**20
# Told how many more bytes of a file were read.
OnRead = Callable[[int], None]


def parquet_records(path: Path, name: str, on_read: OnRead) -> Iterator[Record]:
    """Yield the rows of a parquet file; ``DataError``, which calls it ``name``, if it is none."""
    size, rows = path.stat().st_size, 0
    try:
        with pq.ParquetFile(path, page_checksum_verification=True, buffer_size=READ_BYTES, pre_buffer=False) as file:
            with path.open("rb") as stored:
                require_one_file(stored, file.metadata)
            total = file.metadata.num_rows
            for batch in parquet_batches(name, file, size):
                yield from table_records(pa.Table.from_batches([batch]), first=rows + 1)
                on_read(size * (rows + batch.num_rows) // total - size * rows // total)
                rows += batch.num_rows
    except (pa.ArrowException, OSError, ValueError) as error:  # ValueError: names that are not UTF-8
        raise DataError(f"{name} is not a readable parquet file ({error})") from error


def arrow_records(path: Path, name: str, on_read: OnRead) -> Iterator[Record]:
    """Yield the rows of an Arrow file (feather version 2) or stream, as ``datasets`` writes it.

    It is read and not mapped into memory, where a file that shrinks meanwhile would end the process.

    Raises:
        DataError: It is no such file, or a stream that was cut off or has bytes behind its end; messages call it
            ``name``.
    """
    size, rows, read = path.stat().st_size, 0, 0
    try:
        with pa.OSFile(str(path)) as source:
            is_file = source.read(len(ARROW_FILE)) == ARROW_FILE
            if not is_file:
                source.seek(max(size - len(END_OF_STREAM), 0))
                if source.read() != END_OF_STREAM:
                    raise pa.ArrowInvalid("the mark of its end is missing: it was cut off, or never closed")
            source.seek(0)
            reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
            require_distinct(name, reader.schema.names)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else reader
            decoded = DecodedSize(name, size)
            for batch in batches:
                table = pa.Table.from_batches([batch])
                require_consistent(table)
                decoded.add(table)
                for part in table_slices(table, BATCH_ROWS):
                    yield from table_records(part, first=rows + 1)
                    rows += part.num_rows
                on_read(min(batch.nbytes, size - read))
                read += min(batch.nbytes, size - read)
            if not is_file:
                require_end(source, size)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{name} is not a readable arrow file ({error})") from error
    on_read(size - read)
