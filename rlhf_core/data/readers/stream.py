"""Read records one after the other, from files of any kind and size, compressed or not."""

from __future__ import annotations

import gzip
import io
import lzma
import os
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import pyarrow as pa

from rlhf_core.data.readers.content import (
    COMPRESSIONS,
    HEAD,
    MAX_EXPANSION,
    Record,
    expansion_limit,
    kind_of,
    no_rows,
    require_content,
    require_text,
)
from rlhf_core.data.readers.csv_records import csv_records
from rlhf_core.data.readers.json_records import (
    ExtraData,
    JsonValues,
    json_line_records,
    json_value_records,
    problem_in,
    require_one_list,
)
from rlhf_core.data.readers.table_records import OnRead, arrow_records, parquet_records
from rlhf_core.errors import DataError

TABLES = (".parquet", ".arrow")
# A .json file may be JSON lines whose rows are lists. The rows of a list wait for its end while it is no longer.
HELD_CHARACTERS = 2**23
COPIED = 2**20


def uncounted(count: int) -> None:
    """Do nothing with the number of bytes that were read."""


def stream_records(path: Path, on_read: OnRead = uncounted, name: str = "") -> Iterator[Record]:
    """Yield every record of a file, with a part of the file in memory at a time.

    Args:
        path: The file.
        on_read: Told how many more bytes of it were read.
        name: What tells its kind, and what messages call it; by default the path.

    Raises:
        DataError: The file is missing, empty, not what its name says, or of no known kind.
    """
    name = name or str(path)
    kind, compression = kind_of(name)
    if not path.is_file():
        if path.exists():
            raise DataError(f"cannot read {name}: it is no file; correct the path in collect.files")
        raise DataError(f"{name} does not exist; correct the path in collect.files")
    record: Record | None = None
    for record in _records(_StoredFile(path, name, kind, compression, on_read)):
        yield record
    if record is None:
        raise no_rows(name)


@dataclass(frozen=True)
class _StoredFile:
    """A file to read: ``name`` is what messages call it, ``kind`` and ``compression`` are its suffixes."""

    path: Path
    name: str
    kind: str
    compression: str
    on_read: OnRead


def _records(file: _StoredFile) -> Iterator[Record]:
    if file.kind not in TABLES:
        yield from _text_records(file)
    elif not file.compression:
        yield from _table_records(file)
    else:
        # Tables are read from any place, compressed streams only from the beginning.
        with tempfile.NamedTemporaryFile(prefix="rlhf-unpacked-") as unpacked:
            with io.BufferedReader(CountedFile(file.path, file.on_read)) as stored:
                _unpack(file, stored, unpacked)
            yield from _table_records(replace(file, path=Path(unpacked.name), on_read=uncounted))


def _unpack(file: _StoredFile, stored: io.BufferedReader[Any], unpacked: IO[bytes]) -> None:
    """Decompress a file into a temporary one; ``DataError`` says whether the one or the other is at fault."""
    with _reading(file):
        stream = _decompressing(file.name, stored, file.compression)
    while True:
        with _reading(file):
            part = stream.read(COPIED)
        try:
            unpacked.write(part)
            unpacked.flush()
        except OSError as error:
            raise DataError(
                f"cannot unpack {file.name} into {tempfile.gettempdir()}: {error.strerror}; make room there, or name "
                "another folder in the environment variable TMPDIR"
            ) from error
        if not part:
            return


def _table_records(file: _StoredFile) -> Iterator[Record]:
    with _reading(file), file.path.open("rb") as begin:
        head = begin.read(HEAD)
    if not head or (head.isspace() and len(head) < HEAD):
        return
    require_content(file.name, head)
    records = parquet_records if file.kind == ".parquet" else arrow_records
    yield from records(file.path, file.name, file.on_read)


def _text_records(file: _StoredFile) -> Iterator[Record]:
    with _reading(file):
        head = _head(file)
        if head and not head.isspace():
            require_content(file.name, head)
            require_text(file.name, head, allow_utf16=file.kind == ".json")
        if file.kind == ".json":
            yield from _json_records(file)
            return
        with _opened(file) as stream:
            if file.kind in (".csv", ".tsv"):
                yield from csv_records(file.name, stream, "," if file.kind == ".csv" else "\t")
            else:
                yield from json_line_records(file.name, stream)


def _json_records(file: _StoredFile) -> Iterator[Record]:
    """Yield the rows of a list as they are read, those of ``{"data": [...]}`` when it ends, and JSON lines as such."""
    waiting: list[Record] = []
    are_given, read = False, 0

    def count(more: int) -> None:
        nonlocal read
        read += more
        file.on_read(more)

    def count_beyond(more: int) -> None:
        nonlocal read
        file.on_read(max(more - read, 0))
        read = max(read - more, 0)

    try:
        with _opened(replace(file, on_read=count)) as stream:
            values = JsonValues(file.name, stream)
            if values.begins_list():
                for position, (value, marked) in enumerate(values.of_list(), 1):
                    waiting.append(Record(position, value, problem_in(value) if marked else ""))
                    if values.consumed > HELD_CHARACTERS:
                        are_given = True
                        yield from waiting
                        waiting = []
                yield from waiting
            elif not values.is_empty():
                value, marked = values.single()
                yield from json_value_records(file.name, value, marked)
            return
    except ExtraData as extra:
        require_one_list(file.name, [record.value for record in waiting], str(extra))
        if are_given:
            raise DataError(f"{file.name} is not valid JSON: {extra}") from extra
    with _opened(replace(file, on_read=count_beyond)) as stream:
        yield from json_line_records(file.name, stream)


@contextmanager
def _reading(file: _StoredFile) -> Iterator[None]:
    """Turn errors of reading and decompressing a file into ``DataError``."""
    try:
        yield
    except (EOFError, OSError, zlib.error, lzma.LZMAError, pa.ArrowException) as error:
        if not file.compression:
            raise DataError(f"cannot read {file.name}: {error}") from error
        raise DataError(
            f"{file.name} is not a whole {COMPRESSIONS[file.compression]} file ({error}); copy or download it again"
        ) from error


@contextmanager
def _opened(file: _StoredFile) -> Iterator[io.BufferedReader[Any]]:
    with io.BufferedReader(CountedFile(file.path, file.on_read)) as stored:
        yield _decompressing(file.name, stored, file.compression)


def _head(file: _StoredFile) -> bytes:
    """Return the first bytes of the content."""
    with file.path.open("rb") as stored:
        return _decompressing(file.name, stored, file.compression).read(HEAD)


def _decompressing(name: str, file: io.BufferedReader[Any], compression: str) -> io.BufferedReader[Any]:
    if not compression or not file.peek(1):
        return file
    limit = expansion_limit(os.fstat(file.fileno()).st_size)
    if compression == ".gz":
        stream = cast(BinaryIO, gzip.GzipFile(fileobj=file))
    elif compression == ".xz":
        stream = cast(BinaryIO, io.BufferedReader(XzStream(file)))
    else:
        stream = cast(BinaryIO, pa.CompressedInputStream(pa.PythonFile(file, "r"), "zstd"))
    return io.BufferedReader(Decompressed(name, stream, limit))


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
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Read into ``buffer``; ``DataError`` for more bytes than are allowed."""
        content = self._stream.read(len(buffer))
        buffer[: len(content)] = content
        self._left -= len(content)
        if self._left < 0:
            raise too_large(self._name)
        return len(content)


def too_large(name: str) -> DataError:
    """Return the error for a file that expands to more than its limit."""
    return DataError(
        f"{name} expands to more than {MAX_EXPANSION} times its size, which text does not; decompress it yourself if "
        "that is meant"
    )


class XzStream(io.RawIOBase):
    """The content of all streams of an xz file; :mod:`lzma` itself would ignore what follows the first if that is none.

    Raises ``EOFError`` where a stream is cut off, and ``lzma.LZMAError`` for what is no stream.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decompressor: lzma.LZMADecompressor | None = lzma.LZMADecompressor()
        self._waiting = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Read into ``buffer`` and return the number of bytes, 0 at the end."""
        while True:
            if self._decompressor is None:
                self._skip_padding()
                if not self._waiting:
                    return 0
                self._decompressor = lzma.LZMADecompressor()
            elif self._decompressor.needs_input and not self._waiting:
                self._waiting = self._file.read(COPIED)
                if not self._waiting:
                    raise EOFError("it ends before the end of the stream")
            content = self._decompressor.decompress(self._waiting, len(buffer))
            self._waiting = b""
            if self._decompressor.eof:
                self._waiting, self._decompressor = self._decompressor.unused_data, None
            if content:
                buffer[: len(content)] = content
                return len(content)

    def _skip_padding(self) -> None:
        """Skip the zeros that may follow a stream."""
        self._waiting = self._waiting.lstrip(b"\0")
        while not self._waiting and (read := self._file.read(COPIED)):
            self._waiting = read.lstrip(b"\0")
