"""Rows of parquet and Arrow tables, some thousand at a time, after checks that the file is sound.

Its counts of rows must agree, and its values must fit the size of the file.
"""

from __future__ import annotations

import os
import resource
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rlhf_core.data.readers.csv_records import require_distinct
from rlhf_core.data.row_counts import Record
from rlhf_core.data.tables import CHUNK_BYTES, rows_within, table_slices
from rlhf_core.errors import DataError, first_line, is_exhausted
from rlhf_core.runtime.limited_call import CallLimits, limit_reached, lower_limit

BATCH_ROWS = 2048
# Dialogues shrink to a tenth. A file that expands more than this is no text, or was made to fill
# the memory.
MAX_EXPANSION = 200
ALWAYS_ALLOWED = 64 * 2**20
PARQUET_MARK = b"PAR1"  # the first and the last bytes of a file
# Rows that take fewer bytes of a file than this repeat texts of a dictionary. Their size is seen
# only when they are read, so few are read at a time. A file with more rows than it has room for was
# made to take time.
SHORT_ROW = 32
SHORT_ROWS = 64
POINTER = 8  # bytes that a list takes for each of its values, even if that is None
TYPE_CHARACTERS = 60
LIMITS = CallLimits()
SMALL_STACK = 2**22
SLOWEST_READING = 5_000_000  # bytes of a file that a processor reads in a second, or more
BATCH_EXPANSION = 16  # a batch of a file may take at most so many times the file's size
# What pyarrow raises for values that no Python value can hold; KeyError for an unknown time zone.
CONVERSION_ERRORS = (UnicodeDecodeError, ValueError, OverflowError, KeyError, pa.ArrowException)
# Of these types, each value has a length of its own.
HAVE_LENGTHS = (
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_binary,
    pa.types.is_large_binary,
)
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
ARROW_FILE = b"ARROW1"
# Bytes of a column that are read at a time. Otherwise the whole column of a row group is read, and
# with pre_buffer all columns are kept.
READ_BYTES = 2**20
# Called with the number of bytes of a file that are read so far.
OnRead = Callable[[int], None]


def expansion_limit(size: int) -> int:
    """Return the most bytes that a compressed file of this size may expand to."""
    return max(ALWAYS_ALLOWED, MAX_EXPANSION * size)


def table_records(kind: str, path: Path, name: str, on_read: OnRead) -> Iterator[Record]:
    """Yield the rows of a ``.parquet`` or ``.arrow`` file; ``DataError`` if it cannot be read.

    Args:
        name: What messages call the file.
        on_read: Called with the number of bytes that are read so far.
    """
    size = path.stat().st_size
    rows = 0
    parts_of = parquet_parts if kind == ".parquet" else _arrow_parts
    parts = partial(parts_of, name, path, size)
    _require_readable(name, size, partial(_read_through, kind, parts, path))
    try:
        for table, read in parts():
            yield from _records_of(table, first=rows + 1)
            rows += table.num_rows
            on_read(read)
        on_read(size)
    except (pa.ArrowException, OSError, ValueError) as error:
        # ValueError is about names that are not UTF-8.
        if is_exhausted(error):
            raise
        raise DataError(
            f"{name} is not a readable {kind[1:]} file ({first_line(error)})"
        ) from error


def parquet_parts(name: str, path: Path, size: int) -> Iterator[tuple[pa.Table, int]]:
    """Yield the rows of a parquet file in parts, and how many bytes of it are read with each.

    Raises:
        ArrowInvalid: The file counts other rows than it holds, or is several that were joined.
        DataError: It has a column twice, or holds far more than fits its ``size``.
    """
    rows = 0
    with pq.ParquetFile(
        path, page_checksum_verification=True, buffer_size=READ_BYTES, pre_buffer=False
    ) as file:
        footer = file.metadata
        _require_one_file(path, footer)
        require_distinct(name, file.schema_arrow.names)
        _require_row_counts(file)
        # A page is decompressed as a whole, so the size that it claims is checked before.
        claimed = 0
        for group in _groups(footer):
            claimed += max(group.total_byte_size, SHORT_ROW * group.num_rows)
        _require_size(name, claimed, size)
        batches = file.iter_batches(_batch_rows(footer), use_threads=False)
        for table in _checked(name, batches, size):
            rows += table.num_rows
            yield table, size * rows // footer.num_rows
        if rows != footer.num_rows:
            raise pa.ArrowInvalid(f"its footer counts {footer.num_rows} rows, but it holds {rows}")


def _arrow_parts(name: str, path: Path, size: int) -> Iterator[tuple[pa.Table, int]]:
    """Yield parts of an Arrow file (feather version 2) or stream, as ``datasets`` writes it.

    The file is read, not mapped into memory: a mapped file that shrinks meanwhile would end the
    process.
    """
    read = 0
    with pa.OSFile(str(path)) as source:
        is_file = source.read(len(ARROW_FILE)) == ARROW_FILE
        if not is_file:
            source.seek(max(size - len(END_OF_STREAM), 0))
            if source.read() != END_OF_STREAM:
                raise pa.ArrowInvalid(
                    "the mark of its end is missing: it was cut off, or never closed"
                )
        source.seek(0)
        options = pa.ipc.IpcReadOptions(use_threads=False)
        batches: Iterable[pa.RecordBatch]
        if is_file:
            reader = pa.ipc.open_file(source, options=options)
            batches = map(reader.get_batch, range(reader.num_record_batches))
        else:
            batches = reader = pa.ipc.open_stream(source, options=options)
        require_distinct(name, reader.schema.names)
        for table in _checked(name, batches, size):
            for part in table_slices(table, BATCH_ROWS):
                read += part.nbytes
                yield part, min(read, size)
        if not is_file and source.tell() < size:  # two streams were joined
            raise pa.ArrowInvalid(
                f"{size - source.tell()} bytes follow the end of its stream: save one stream to a file"
            )


def _checked(name: str, batches: Iterable[pa.RecordBatch], size: int) -> Iterator[pa.Table]:
    """Yield the rows of a file whose values can be read; texts that are not UTF-8 stay.

    Raises:
        ArrowInvalid: An offset or index leads out of a column: reading it would crash the process.
        DataError: The values are together far larger than the file.
    """
    total = 0
    for batch in batches:
        for column in batch.columns:
            try:
                column.validate(full=True)
            except pa.ArrowInvalid as error:
                if "UTF8" not in str(error):
                    raise
                column.view(_bytes_for_texts(column.type)).validate(full=True)
        decoded = sum(map(_decoded_bytes, batch.columns))
        total += max(decoded, SHORT_ROW * batch.num_rows)
        _require_size(name, total, size)
        yield pa.Table.from_batches([batch])


def _require_size(name: str, decoded: int, size: int) -> None:
    """Raise ``DataError`` if values of ``decoded`` bytes are far larger than their file."""
    if decoded > expansion_limit(size):
        raise DataError(
            f"{name} holds values of more than {MAX_EXPANSION} times its size, which text does not; save it as JSON "
            "lines if that is meant"
        )


def _records_of(table: pa.Table, first: int) -> list[Record]:
    """Return the rows of a table, the first of which has the number ``first``.

    They are read one value at a time where some cannot become Python values (bad UTF-8, a timestamp
    out of range).
    """
    try:
        return [Record(position, row) for position, row in enumerate(table.to_pylist(), first)]
    except CONVERSION_ERRORS:
        pass
    rows: list[dict[str, Any]] = [{} for _ in range(table.num_rows)]
    problems = [""] * table.num_rows
    for name in table.column_names:
        for index, value in enumerate(table.column(name)):
            try:
                rows[index][name] = value.as_py()
            except CONVERSION_ERRORS as error:
                problems[index] = f"the column {name} cannot be read ({first_line(error)})"
    positions = range(first, first + len(rows))
    return list(map(Record, positions, rows, problems))


def _groups(footer: pq.FileMetaData) -> list[pq.RowGroupMetaData]:
    return [footer.row_group(i) for i in range(footer.num_row_groups)]


def _batch_rows(footer: pq.FileMetaData) -> int:
    """Return how many rows of a parquet file to read at a time: fewer if they are long."""
    limits = [BATCH_ROWS]
    for group in _groups(footer):
        if group.total_byte_size < SHORT_ROW * group.num_rows:
            limits.append(SHORT_ROWS)
        elif group.total_byte_size > CHUNK_BYTES:
            limits.append(rows_within(CHUNK_BYTES, group.num_rows, group.total_byte_size))
    return min(limits)


def _require_row_counts(file: pq.ParquetFile) -> None:
    """Raise ``ArrowInvalid`` unless all parts of a parquet file count the same rows.

    These are the footer, the row groups and the columns.
    """
    footer = file.metadata
    total = sum(group.num_rows for group in _groups(footer))
    if footer.num_rows != total:
        raise pa.ArrowInvalid(f"its footer counts {footer.num_rows} rows, its row groups {total}")
    flat = [i for i in range(footer.num_columns) if file.schema.column(i).max_repetition_level == 0]
    for group in _groups(footer):
        for column in map(group.column, flat):  # columns without lists
            if column.num_values != group.num_rows:
                raise pa.ArrowInvalid(
                    f"its column {column.path_in_schema} has {column.num_values} values in a group of "
                    f"{group.num_rows} rows"
                )


def _require_readable(name: str, size: int, read_through: Callable[[], None]) -> None:
    """Raise ``DataError`` if reading a file would end the process, or fill its memory.

    Arrow follows a schema to any depth, and gives a page or a buffer as much memory as that claims
    to need, whatever the footer says. So the file is read in a child process first, which takes a
    small part of the time that making Python values takes afterwards.
    """
    needed = max(LIMITS.memory, BATCH_EXPANSION * size)
    memory = min(expansion_limit(size), needed) + ALWAYS_ALLOWED
    cpu_seconds = LIMITS.cpu_seconds + size // SLOWEST_READING
    seconds = LIMITS.seconds + size / SLOWEST_READING
    limits = CallLimits(cpu_seconds, seconds, memory)
    if reached := limit_reached(read_through, limits):
        raise DataError(
            f"{name} cannot be read: that {reached}; it is damaged, made to do harm, or no text: save its rows as JSON "
            "lines"
        )


def _read_through(kind: str, parts: Callable[[], Iterable[object]], path: Path) -> None:
    """Read a whole file on half of the usual stack, so that the rest is a margin."""
    lower_limit(resource.RLIMIT_STACK, SMALL_STACK)
    pa.set_memory_pool(pa.system_memory_pool())  # which reserves nothing
    if kind == ".parquet":
        with pq.ParquetFile(path, buffer_size=READ_BYTES, pre_buffer=False) as file:
            str(file.schema_arrow)
            str(file.schema)
    deque(parts(), maxlen=0)


def _require_one_file(path: Path, footer: pq.FileMetaData) -> None:
    """Raise ``ArrowInvalid`` if several parquet files were joined to one.

    A reader would see the rows of only one of them.

    Between the last page that the footer names and the footer are indexes, and in joined files the
    end of a file.
    """
    begin = len(PARQUET_MARK)
    for group in _groups(footer):
        for column in map(group.column, range(group.num_columns)):
            first_page = column.data_page_offset
            if first_page:
                first_page = min(column.dictionary_page_offset or first_page, first_page)
                begin = max(begin, first_page + column.total_compressed_size)
    with path.open("rb") as stored:
        size = stored.seek(0, os.SEEK_END)
        stored.seek(min(begin, size))
        between = max(size - begin - footer.serialized_size, 0)
        if 2 * PARQUET_MARK in stored.read(between):
            raise pa.ArrowInvalid(
                "several parquet files were joined to one; give each as a file of its own"
            )


def _decoded_bytes(values: pa.Array) -> int:
    """Return roughly the size of values as Python's, however deep; shared ones count each time.

    Raises:
        ArrowInvalid: They are of a type in which values can be shared in further ways.
    """
    kind = values.type
    types = pa.types
    count = len(values)
    rows = SHORT_ROW * count
    pointers = POINTER * count
    if isinstance(values, pa.ExtensionArray):
        return _decoded_bytes(values.storage)
    if types.is_struct(kind):
        fields = map(values.field, range(kind.num_fields))
        return rows + sum(map(_decoded_bytes, fields))
    if types.is_map(kind):
        return rows + _decoded_bytes(values.keys) + _decoded_bytes(values.items)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return rows + _decoded_bytes(values.flatten())
    if types.is_dictionary(kind) and not types.is_nested(kind.value_type):
        shared = kind.value_type
        if any(has_lengths(shared) for has_lengths in HAVE_LENGTHS):
            lengths = pc.binary_length(values.dictionary).take(values.indices)
            return int(pc.sum(lengths).as_py() or 0) + pointers
        if types.is_primitive(shared) or types.is_fixed_size_binary(shared):
            return count * (shared.bit_width // 8) + pointers
    elif types.is_string_view(kind) or types.is_binary_view(kind):
        # A view is 16 bytes, of which the first four are the length of its text.
        views = np.frombuffer(values.buffers()[1] or b"", np.int32)[::4]
        lengths = views[values.offset : values.offset + count]
        is_valid = values.is_valid().to_numpy(zero_copy_only=False)
        return int(lengths[is_valid].sum(dtype=np.int64)) + pointers
    elif not (types.is_nested(kind) or types.is_run_end_encoded(kind) or types.is_dictionary(kind)):
        return max(int(values.nbytes), pointers)
    raise pa.ArrowInvalid(
        f"values of the type {str(kind)[:TYPE_CHARACTERS]} are not read; save them as texts, numbers, lists or objects"
    )


def _bytes_for_texts(kind: pa.DataType) -> pa.DataType:
    """Return a type with bytes in place of texts, also inside lists and objects."""
    types = pa.types
    if types.is_string(kind):
        return pa.binary()
    if types.is_large_string(kind):
        return pa.large_binary()
    if types.is_struct(kind):
        fields = map(kind.field, range(kind.num_fields))
        return pa.struct([field.with_type(_bytes_for_texts(field.type)) for field in fields])
    if types.is_list(kind) or types.is_large_list(kind):
        field = kind.value_field
        item = field.with_type(_bytes_for_texts(field.type))
        make = pa.list_ if types.is_list(kind) else pa.large_list
        return make(item)
    return kind
