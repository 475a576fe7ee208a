"""Rows of parquet and Arrow tables, some thousand at a time; counts must agree, and texts fit the size of the file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rlhf_core.data.readers.content import MAX_EXPANSION, Record, expansion_limit
from rlhf_core.data.readers.csv_records import require_distinct
from rlhf_core.data.tables import CHUNK_BYTES, rows_within, table_slices
from rlhf_core.errors import DataError

BATCH_ROWS = 2048
PARQUET_MARK = b"PAR1"  # the first and the last bytes of a file
# Rows that take fewer bytes of a file than this repeat texts of a dictionary, whose size is seen only when they are
# read: few at a time.
SHORT_ROW = 32
SHORT_ROWS = 64
# What pyarrow raises for values that no Python value can hold; KeyError for a time zone that nobody knows.
CONVERSION_ERRORS = (UnicodeDecodeError, ValueError, OverflowError, KeyError, pa.ArrowException)
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
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


def parquet_batches(name: str, file: pq.ParquetFile, size: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a parquet file of ``size`` bytes, some hundred at a time; ``DataError`` calls it ``name``.

    Raises:
        DataError: Two columns have one name, or the values are far larger than the file.
        ArrowInvalid: Counts of rows do not agree, or an offset leads out of a column.
    """
    require_distinct(name, file.schema_arrow.names)
    require_row_counts(file)
    decoded, rows = DecodedSize(name, size), 0
    for batch in file.iter_batches(batch_rows(file.metadata)):
        table = pa.Table.from_batches([batch])
        decoded.add(table)
        require_consistent(table)
        rows += batch.num_rows
        yield batch
    if rows != file.metadata.num_rows:
        raise pa.ArrowInvalid(f"its footer counts {file.metadata.num_rows} rows, but it holds {rows}")


def require_end(source: pa.NativeFile, size: int) -> None:
    """Raise ``ArrowInvalid`` where a stream that was read to its end is not the whole file, as of two joined ones."""
    if source.tell() < size:
        raise pa.ArrowInvalid(f"{size - source.tell()} bytes follow the end of its stream: save one stream to a file")


def require_consistent(table: pa.Table) -> None:
    """Raise ``ArrowInvalid`` where an offset or index leads out of a column: reading it would crash the process.

    Texts that are not UTF-8 stay: only their rows are refused.
    """
    for chunk in (chunk for column in table.columns for chunk in column.chunks):
        try:
            chunk.validate(full=True)
        except pa.ArrowInvalid as error:
            if "UTF8" not in str(error):
                raise
            as_bytes(chunk).validate(full=True)


def table_records(table: pa.Table, first: int = 1) -> list[Record]:
    """Return the rows of a table, or of a part of it whose first row has the number ``first``."""
    try:
        return [Record(position, row) for position, row in enumerate(table.to_pylist(), first)]
    except CONVERSION_ERRORS:
        return _rows_with_bad_values(table, first)


def _rows_with_bad_values(table: pa.Table, first: int) -> list[Record]:
    """Read a table one value at a time: some cannot become Python values (bad UTF-8, a timestamp out of range)."""
    rows: list[dict[str, Any]] = [{} for _ in range(table.num_rows)]
    problems = [""] * table.num_rows
    for name in table.column_names:
        for index, value in enumerate(table.column(name)):
            try:
                rows[index][name] = value.as_py()
            except CONVERSION_ERRORS as error:
                problems[index] = f"the column {name} cannot be read ({error})"
    return [Record(n, row, problem) for n, (row, problem) in enumerate(zip(rows, problems, strict=True), first)]


def batch_rows(footer: pq.FileMetaData) -> int:
    """Return how many rows of a parquet file to read at a time: fewer where those of a row group are long."""
    groups = [footer.row_group(i) for i in range(footer.num_row_groups)]
    are_short = any(group.total_byte_size < SHORT_ROW * group.num_rows for group in groups)
    long = [group for group in groups if group.total_byte_size > CHUNK_BYTES]
    fitting = [rows_within(CHUNK_BYTES, group.num_rows, group.total_byte_size) for group in long]
    return min([BATCH_ROWS, *fitting, *([SHORT_ROWS] if are_short else [])])


def require_row_counts(file: pq.ParquetFile) -> None:
    """Raise ``ArrowInvalid`` where a parquet file's footer, row groups and columns do not count the same rows."""
    footer = file.metadata
    groups = [footer.row_group(i) for i in range(footer.num_row_groups)]
    total = sum(group.num_rows for group in groups)
    if footer.num_rows != total:
        raise pa.ArrowInvalid(f"its footer counts {footer.num_rows} rows, its row groups {total}")
    flat = [i for i in range(footer.num_columns) if file.schema.column(i).max_repetition_level == 0]
    for group in groups:
        for i in flat:
            column = group.column(i)
            if column.num_values != group.num_rows:
                raise pa.ArrowInvalid(
                    f"its column {column.path_in_schema} has {column.num_values} values in a group of "
                    f"{group.num_rows} rows"
                )


def require_one_file(stored: BinaryIO, footer: pq.FileMetaData) -> None:
    """Raise ``ArrowInvalid`` where several parquet files were joined to one, of which a reader sees one file's rows.

    Between the last page that the footer names and the footer are indexes, and in joined files the end of a file.
    """
    groups = [footer.row_group(i) for i in range(footer.num_row_groups)]
    columns = [group.column(i) for group in groups for i in range(group.num_columns)]
    ends = [
        min(filter(None, (column.dictionary_page_offset, column.data_page_offset))) + column.total_compressed_size
        for column in columns
        if column.data_page_offset
    ]
    begin = max(ends, default=len(PARQUET_MARK))
    size = stored.seek(0, os.SEEK_END)
    stored.seek(min(begin, size))
    if 2 * PARQUET_MARK in stored.read(max(size - begin - footer.serialized_size, 0)):
        raise pa.ArrowInvalid("several parquet files were joined to one; give each as a file of its own")


class DecodedSize:
    """How large the values of a table are as they are read; see :func:`expansion_limit`."""

    def __init__(self, name: str, size: int) -> None:
        """Begin with no rows of the file ``name``, which has ``size`` bytes."""
        self._name, self._left = name, expansion_limit(size)

    def add(self, table: pa.Table) -> None:
        """Count some rows.

        Raises:
            DataError: The values are together far larger than the file.
        """
        self._left -= sum(_decoded_bytes(chunk) for column in table.columns for chunk in column.chunks)
        if self._left < 0:
            raise DataError(
                f"{self._name} holds values of more than {MAX_EXPANSION} times its size, which text does not; save it "
                "as JSON lines if that is meant"
            )


def _decoded_bytes(values: pa.Array) -> int:
    """Return the size of values, each text of a dictionary counted as often as it occurs."""
    if not pa.types.is_dictionary(values.type):
        return int(values.nbytes)
    texts = values.dictionary
    if not (pa.types.is_string(texts.type) or pa.types.is_large_string(texts.type)):
        return int(values.nbytes)
    return int(pc.sum(pc.binary_length(texts).take(values.indices)).as_py() or 0) + int(values.indices.nbytes)


def as_bytes(values: pa.Array) -> pa.Array:
    """Return the same values with bytes for texts, also inside lists and objects; nothing is copied or looked at.

    Dictionaries, maps and other types stay what they are.
    """
    return values.view(_bytes_for_texts(values.type))


def _bytes_for_texts(kind: pa.DataType) -> pa.DataType:
    """Return a type with bytes in place of texts."""
    types = pa.types
    if types.is_string(kind):
        return pa.binary()
    if types.is_large_string(kind):
        return pa.large_binary()
    if types.is_struct(kind):
        return pa.struct([_of_bytes(kind.field(i)) for i in range(kind.num_fields)])
    if types.is_large_list(kind):
        return pa.large_list(_of_bytes(kind.value_field))
    if types.is_list(kind):
        return pa.list_(_of_bytes(kind.value_field))
    return kind


def _of_bytes(field: pa.Field) -> pa.Field:
    return field.with_type(_bytes_for_texts(field.type))
