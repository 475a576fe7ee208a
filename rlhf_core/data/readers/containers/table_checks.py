"""Checks of parquet and Arrow tables: counts that agree, and texts that are not far larger than the file."""

from __future__ import annotations

import os
from typing import BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rlhf_core.data.chunks import CHUNK_BYTES, rows_within
from rlhf_core.data.readers.containers.compression import MAX_EXPANSION, expansion_limit
from rlhf_core.errors import DataError

BATCH_ROWS = 2048
PARQUET_MARK = b"PAR1"  # the first and the last bytes of a file
# Rows that take fewer bytes of a file than this repeat texts of a dictionary, whose size is seen only when they are
# read: few at a time.
SHORT_ROW = 32
SHORT_ROWS = 64


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
