"""Parquet files row by row and chunk by chunk, so that no file has to fit into memory."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import is_dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_core.errors import DataError, first_line, is_exhausted
from rlhf_core.storage.files import new_part, permitted, unwritable

# A chunk is complete with so many bytes of texts. A stage holds its rows in a few forms at once,
# each as large.
CHUNK_BYTES = 32 * 2**20
Item = TypeVar("Item")


def chunked(
    items: Iterable[Item], most: int, size: Callable[[Item], int], most_bytes: int | None = None
) -> Iterator[list[Item]]:
    """Yield items in lists of ``most`` of them, or of about ``most_bytes`` bytes if that is less.

    Args:
        most_bytes: By default ``CHUNK_BYTES``.
    """
    limit = CHUNK_BYTES if most_bytes is None else most_bytes
    chunk: list[Item] = []
    held = 0
    for item in items:
        chunk.append(item)
        held += size(item)
        if len(chunk) >= most or held >= limit:
            yield chunk
            chunk = []
            held = 0
    if chunk:
        yield chunk


def drained(items: list[Item]) -> Iterator[Item]:
    """Yield the items of a list and take them out, so that none is held longer than needed."""
    waiting = deque(items)
    items.clear()
    while waiting:
        yield waiting.popleft()


def bytes_in_memory(value: Any) -> int:
    """Return the bytes that a value takes, with all that it holds."""
    total = 0
    waiting = [value]
    while waiting:
        item = waiting.pop()
        total += sys.getsizeof(item)
        if isinstance(item, dict):
            waiting.extend(item.values())
        elif isinstance(item, list | tuple):
            waiting.extend(item)
        elif is_dataclass(item):
            waiting.extend(vars(item).values())
    return total


def rows_within(most_bytes: int, rows: int, size: int) -> int:
    """Return how many of ``rows`` rows of ``size`` bytes together fit into ``most_bytes``, at least 1."""
    return max(1, rows * most_bytes // max(size, most_bytes))


def table_slices(table: pa.Table, most: int, most_bytes: int | None = None) -> Iterator[pa.Table]:
    """Yield a table in slices of at most ``most`` rows and about ``most_bytes`` bytes, uncopied.

    A slice has more than twice the bytes only if it is one row. By default ``most_bytes`` is
    ``CHUNK_BYTES``.
    """
    limit = CHUNK_BYTES if most_bytes is None else most_bytes
    rows = max(1, min(most, rows_within(limit, table.num_rows, table.nbytes)))
    for start in range(0, table.num_rows, rows):
        part = table.slice(start, rows)
        if part.num_rows > 1 and part.nbytes > 2 * limit:
            yield from table_slices(part, most, limit)
        else:
            yield part


# A row group is written when so many rows or bytes wait for it.
ROW_GROUP_ROWS = 65_536
ROW_GROUP_BYTES = CHUNK_BYTES
CHUNK_ROWS = 4096


class TableWriter:
    """Writes a parquet file from tables one by one; it appears once the block ends.

    A file of one row group has the same bytes however its rows arrived.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.path = Path(path)
        self.schema = schema
        self._waiting: list[pa.Table] = []
        self._waiting_rows = self._waiting_bytes = 0
        self._groups = 0

    def __enter__(self) -> TableWriter:
        try:
            self._temporary = new_part(self.path)
        except OSError as error:
            raise unwritable(self.path, error, DataError) from error
        try:
            with self._named():
                self._parquet = pq.ParquetWriter(self._temporary, self.schema, compression="zstd")
        except BaseException:
            self._temporary.unlink()
            raise
        return self

    def write(self, table: pa.Table) -> None:
        # Arrow cannot read a row group whose texts exceed 2 GiB, which a few thousand long rows can
        # have.
        for part in table_slices(table, table.num_rows, ROW_GROUP_BYTES):
            self._waiting.append(part)
            self._waiting_rows += part.num_rows
            self._waiting_bytes += part.nbytes
            if self._waiting_rows >= ROW_GROUP_ROWS or self._waiting_bytes >= ROW_GROUP_BYTES:
                self._write_group()

    def _write_group(self) -> None:
        # The pages of a row group depend on the chunks of its columns.
        group = pa.concat_tables([self.schema.empty_table(), *self._waiting]).combine_chunks()
        with self._named():
            self._parquet.write_table(group, row_group_size=max(group.num_rows, 1))
        self._waiting = []
        self._waiting_rows = 0
        self._waiting_bytes = 0
        self._groups += 1

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Add the file to an error of Arrow, which does not say where it happened."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, os.strerror(error.errno or 0), str(self.path)) from error

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None and (self._waiting_rows or not self._groups):
                self._write_group()
            with self._named() if error is None else suppress(OSError):
                self._parquet.close()
            if error is None:
                self._temporary.chmod(permitted(0o644))
                self._temporary.replace(self.path)
        finally:
            self._temporary.unlink(missing_ok=True)


# Whom reads are told. Libraries read in threads of their own, which know no context of the caller.
_read_notes: list[Callable[[Path], None]] = []


@contextmanager
def reads_noted(note: Callable[[Path], None]) -> Iterator[None]:
    """Call ``note`` with each data file that this process reads inside the block."""
    _read_notes.append(note)
    try:
        yield
    finally:
        _read_notes.remove(note)


def require_data_file(path: Path) -> None:
    """Raise ``DataError`` where a data file that is to be read is missing; note it where asked."""
    if not path.is_file():
        raise DataError(f"{path} does not exist; run the stage that writes it")
    for note in _read_notes:
        note(path)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Raise ``DataError`` inside the block where a parquet file is missing or damaged."""
    require_data_file(path)
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        if is_exhausted(error):
            raise
        raise DataError(
            f"{path} is not a readable parquet file ({first_line(error)}); run the stage that writes it again"
        ) from error


def parquet_footer(path: Path) -> tuple[pa.Schema, int]:
    """Return the schema of a parquet file and how many rows it has."""
    with readable(path), pq.ParquetFile(path) as file:
        return file.schema_arrow, file.metadata.num_rows


def table_chunks(path: Path, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """Yield the rows of a parquet file in order, thousands at a time, fewer where they are long.

    Raises:
        DataError: It is missing, unreadable or lacks a column.
    """
    # Buffered, all that was read of the file would be kept.
    with readable(path), pq.ParquetFile(path, pre_buffer=False) as file:
        wanted = list(columns) if columns else None
        for group in range(
            file.num_row_groups
        ):  # a batch over several of them could exceed 2 GiB of text
            about = file.metadata.row_group(group)
            rows = min(CHUNK_ROWS, rows_within(CHUNK_BYTES, about.num_rows, about.total_byte_size))
            batches = file.iter_batches(rows, row_groups=[group], columns=wanted, use_threads=False)
            for batch in batches:
                yield pa.Table.from_batches([batch])


def mapped_table(path: Path, schema: pa.Schema, parts: Iterable[pa.Table]) -> pa.Table:
    """Write tables to an Arrow file and map it, so that only the parts in use are in memory.

    The file must stay as long as the table is used.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for part in parts:
            writer.write_table(part)
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()


class TableRows(Sequence[Item], Generic[Item]):
    """Rows of a table, each of which is made anew when it is asked for.

    Attributes:
        rows: Their numbers in the table, in the order of the sequence (N,).
    """

    def __init__(
        self,
        rows: npt.NDArray[np.int64],
        make: Callable[[npt.NDArray[np.int64]], Sequence[Item]],
        part: int = 1,
    ) -> None:
        """Make a sequence of some rows.

        Args:
            part: How many are made together where all are asked for.
        """
        self.rows = rows
        self._make = make
        self._part = part

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, number: int) -> Item: ...

    @overload
    def __getitem__(self, number: slice) -> TableRows[Item]: ...

    def __getitem__(self, number: int | slice) -> Item | TableRows[Item]:
        if isinstance(number, slice):
            return self.of(self.rows[number])
        return self._make(self.rows[[number]])[0]

    def __iter__(self) -> Iterator[Item]:
        for start in range(0, len(self.rows), self._part):
            yield from self._make(self.rows[start : start + self._part])

    def of(self, rows: npt.NDArray[np.int64]) -> TableRows[Item]:
        """The rows of these numbers in the table."""
        return TableRows(rows, self._make, self._part)
