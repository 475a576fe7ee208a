"""Read records one after the other, from files of any kind and size, compressed or not."""

from __future__ import annotations

import gzip
import io
import lzma
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, BinaryIO

import pyarrow as pa

from rlhf_core.data.readers.csv_records import csv_records
from rlhf_core.data.readers.json_records import json_line_records, json_records, require_narrow_text
from rlhf_core.data.readers.table_records import (
    MAX_EXPANSION,
    OnRead,
    expansion_limit,
    table_records,
)
from rlhf_core.data.row_counts import Record
from rlhf_core.errors import DataError, is_exhausted
from rlhf_core.storage.files import scratch_file, temporary_root

KINDS = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".xz": "xz"}
# The first bytes of files of other kinds, what they are, and the suffix that the readers expect.
MAGIC = (
    (b"\x1f\x8b", "gzip", ".gz"),
    (b"\x28\xb5\x2f\xfd", "zstd", ".zst"),
    (b"\xfd7zXZ\x00", "xz", ".xz"),
    (b"PAR1", "parquet", ".parquet"),
    (b"ARROW1", "arrow", ".arrow"),
)
ZIP = b"PK\x03\x04"
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
WEB_PAGE = (b"<!doctype html", b"<html")
HEAD = 4096
TABLES = (".parquet", ".arrow")
COPIED = 2**20
UNPACK_MEMORY = 2**30  # An xz file may demand up to 4 GiB to be unpacked; one of xz -9, 65 MiB.


def uncounted(position: int) -> None:
    """Do nothing with the number of bytes that were read."""


def stream_records(path: Path, on_read: OnRead = uncounted, name: str = "") -> Iterator[Record]:
    """Yield every record of a file, with a part of the file in memory at a time.

    Args:
        on_read: Called with the number of bytes that are read so far. It is lower than before if
            reading starts again.
        name: The name that tells its kind, and that messages use; by default the path.

    Raises:
        DataError: The file is missing, empty, not what its name says, or of no known kind.
    """
    name = name or str(path)
    file = _StoredFile(path, name, on_read)
    if not path.is_file():
        if path.exists():
            raise DataError(f"cannot read {name}: it is no file; correct the path")
        raise DataError(f"{name} does not exist; correct the path")
    record: Record | None = None
    for record in file.records():
        yield record
    if record is None:
        raise DataError(
            f"{name} is empty: there are no rows in it; give a file that has some, or take it out of the sources"
        )


def kind_of(name: str) -> tuple[str, str]:
    """Return the suffixes that tell what a file is and how it is compressed ("" if it is not)."""
    suffixes = [suffix.lower() for suffix in PurePosixPath(name).suffixes]
    compression = ""
    if suffixes[-1:] and suffixes[-1] in COMPRESSIONS:
        compression = suffixes.pop()
    kind = suffixes[-1] if suffixes else ""
    if kind not in KINDS:
        given = kind or compression or "without suffix"
        known = f"{', '.join(KINDS)}, each also with {', '.join(COMPRESSIONS)}"
        raise DataError(f"{name}: unknown kind of file {given!r}; known are {known}")
    return kind, compression


def require_content(name: str, kind: str, head: bytes) -> None:
    """Refuse a file that does not begin as its kind does, even if a reader could make rows of it.

    Raises:
        DataError: It is what a download leaves in place of a file: a web page, or a pointer of Git
            LFS. Or it should be text in UTF-8, and is compressed, of another kind, or in UTF-16 or
            UTF-32 (which JSON may be in).
    """
    if head.startswith(LFS_POINTER):
        raise DataError(
            f"{name} is a pointer of Git LFS, not the file itself; get that with `git lfs pull`"
        )
    if head.lstrip().lower().startswith(WEB_PAGE):
        raise DataError(
            f"{name} is a web page, not data: the download may have needed a login; get the file again"
        )
    if kind in TABLES:
        return
    for magic, found, suffix in MAGIC:
        if head.startswith(magic):
            raise DataError(
                f"{name} is {found} by its content; give it a name that ends with {suffix}, or unpack it"
            )
    if head.startswith(ZIP):
        raise DataError(
            f"{name} is a zip archive (tables of Excel are too); unpack it, or save the table as CSV"
        )
    if not head.strip(b"\0"):
        raise DataError(
            f"{name} is not text: it begins with {len(head)} zero bytes; get the file again"
        )
    if kind != ".json":
        require_narrow_text(name, head)


class _StoredFile:
    """A file to read, which messages call ``name``."""

    def __init__(self, path: Path, name: str, on_read: OnRead) -> None:
        self.path = path
        self.name = name
        self.on_read = on_read
        self.kind, self.compression = kind_of(name)

    def records(self) -> Iterator[Record]:
        """Yield its records; none where it has no content."""
        with self.reading(), self.opened(uncounted) as stream:
            head = stream.read(HEAD)
        if head.strip():
            require_content(self.name, self.kind, head)
        elif len(head) < HEAD:
            return
        if self.kind in TABLES:
            yield from self._table_records()
            return
        with self.reading():
            if self.kind == ".json":
                yield from json_records(self.name, partial(self.opened, self.on_read))
                return
            with self.opened(self.on_read) as stream:
                if self.kind == ".csv":
                    yield from csv_records(self.name, stream, ",")
                elif self.kind == ".tsv":
                    yield from csv_records(self.name, stream, "\t")
                else:
                    yield from json_line_records(self.name, stream)

    def _table_records(self) -> Iterator[Record]:
        if not self.compression:
            yield from table_records(self.kind, self.path, self.name, self.on_read)
            return
        # Tables are read from any place, compressed streams only from the beginning.
        with scratch_file("rlhf-unpacked-") as unpacked:
            with self.reading(), self.opened(self.on_read) as stream:
                while part := stream.read(COPIED):
                    self._unpack(part, unpacked)
            yield from table_records(self.kind, Path(unpacked.name), self.name, uncounted)

    def _unpack(self, part: bytes, unpacked: IO[bytes]) -> None:
        try:
            unpacked.write(part)
            unpacked.flush()
        except OSError as error:
            raise DataError(
                f"cannot unpack {self.name} into {temporary_root()}: {error.strerror}; make room there, or name "
                "another folder in the environment variable TMPDIR"
            ) from error

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Turn errors of reading and decompressing the file into ``DataError``."""
        try:
            yield
        except (EOFError, OSError, zlib.error, lzma.LZMAError, pa.ArrowException) as error:
            if is_exhausted(error):
                raise
            if not self.compression:
                raise DataError(f"cannot read {self.name}: {error}") from error
            if "Memory usage limit" in str(error):
                raise DataError(
                    f"{self.name} takes more than {UNPACK_MEMORY >> 30} GiB of memory to unpack; pack it with `xz -9` "
                    "or less"
                ) from error
            raise DataError(
                f"{self.name} is not a whole {COMPRESSIONS[self.compression]} file ({error}); copy or download it again"
            ) from error

    @contextmanager
    def opened(self, on_read: OnRead) -> Iterator[io.BufferedReader[Any]]:
        """Open the file for its decompressed content."""
        with io.BufferedReader(_CountedFile(self.path, on_read)) as stored:
            if not self.compression or not stored.peek(1):
                yield stored
                return
            if self.compression == ".xz":
                parts = _xz_parts(stored)
            else:
                stream: Any = gzip.GzipFile(fileobj=stored)
                if self.compression == ".zst":
                    stream = pa.CompressedInputStream(pa.PythonFile(stored, "r"), "zstd")
                parts = iter(partial(stream.read, COPIED), b"")
            yield io.BufferedReader(
                _Decompressed(self.name, parts, os.fstat(stored.fileno()).st_size)
            )


class _CountedFile(io.FileIO):
    """A file that reports how much of it is read."""

    def __init__(self, path: Path, on_read: OnRead) -> None:
        super().__init__(path)
        self._on_read = on_read

    def readinto(self, buffer: object) -> int | None:
        count = super().readinto(buffer)  # type: ignore[arg-type]
        self._on_read(self.tell())
        return count


class _Decompressed(io.RawIOBase):
    """The decompressed content of a file of ``size`` bytes; too large an expansion is refused."""

    def __init__(self, name: str, parts: Iterator[bytes], size: int) -> None:
        self._name = name
        self._parts = parts
        self._left = expansion_limit(size)
        self._waiting = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if not self._waiting:
            self._waiting = memoryview(next(self._parts, b""))
            self._left -= len(self._waiting)
            if self._left < 0:
                raise DataError(
                    f"{self._name} expands to more than {MAX_EXPANSION} times its size, which text does not; "
                    "decompress it yourself if that is meant"
                )
        count = min(len(buffer), len(self._waiting))
        buffer[:count] = self._waiting[:count]
        self._waiting = self._waiting[count:]
        return count


def _xz_parts(file: BinaryIO) -> Iterator[bytes]:
    """Yield the content of all streams of an xz file; :mod:`lzma` would stop after the first."""
    decompressor = lzma.LZMADecompressor(memlimit=UNPACK_MEMORY)
    waiting = b""
    while True:
        if decompressor.eof:
            waiting = decompressor.unused_data.lstrip(b"\0")  # zeros may follow a stream
            while not waiting and (read := file.read(COPIED)):
                waiting = read.lstrip(b"\0")
            if not waiting:
                return
            decompressor = lzma.LZMADecompressor(memlimit=UNPACK_MEMORY)
        elif decompressor.needs_input:
            waiting = file.read(COPIED)
            if not waiting:
                raise EOFError("it ends before the end of the stream")
        content = decompressor.decompress(waiting, COPIED)
        waiting = b""
        if content:
            yield content
