"""Decompress data files by their suffix."""

from __future__ import annotations

import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from typing import BinaryIO

import pyarrow as pa

from rlhf_core.errors import DataError

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".xz": "xz"}
# Dialogues shrink to a tenth; what expands further than this was made to fill the memory, or is no text.
MAX_EXPANSION = 200
ALWAYS_ALLOWED = 64 * 2**20
CHUNK = 2**20


def decompressed(name: str, content: bytes, suffix: str) -> bytes:
    """Return ``content`` decompressed as ``suffix`` says; as it is where that is empty.

    Raises:
        DataError: It is no such file, not the whole of it, has other bytes behind it, or expands beyond measure.
    """
    if not suffix or not content:
        return content
    limit = expansion_limit(len(content))
    result = bytearray()
    try:
        for part in STREAMS[suffix](content):
            result += part
            if len(result) > limit:
                raise too_large(name)
    except (EOFError, OSError, zlib.error, lzma.LZMAError, pa.ArrowException) as error:
        raise DataError(
            f"{name} is not a whole {COMPRESSIONS[suffix]} file ({error}); copy or download it again"
        ) from error
    return bytes(result)


def expansion_limit(size: int) -> int:
    """Return how many bytes a compressed file of this size may expand to."""
    return max(ALWAYS_ALLOWED, MAX_EXPANSION * size)


def too_large(name: str) -> DataError:
    """Return the error for a file that expands to more than its limit."""
    return DataError(
        f"{name} expands to more than {MAX_EXPANSION} times its size, which text does not; decompress it yourself if "
        "that is meant"
    )


def _gzip(content: bytes) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=io.BytesIO(content)) as stream:
        while part := stream.read(CHUNK):
            yield part


def _zstd(content: bytes) -> Iterator[bytes]:
    with pa.CompressedInputStream(pa.BufferReader(content), "zstd") as stream:
        while part := stream.read(CHUNK):
            yield part


def _xz(content: bytes) -> Iterator[bytes]:
    with io.BufferedReader(XzStream(io.BytesIO(content)), CHUNK) as stream:
        while part := stream.read(CHUNK):
            yield part


class XzStream(io.RawIOBase):
    """The content of all streams of an xz file; :mod:`lzma` itself would ignore what follows the first if that is none.

    Raises ``EOFError`` where a stream is cut off, and ``lzma.LZMAError`` for what is no stream.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decompressor: lzma.LZMADecompressor | None = lzma.LZMADecompressor()
        self._waiting = b""

    def readable(self) -> bool:
        """Return True."""
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
                self._waiting = self._file.read(CHUNK)
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
        while not self._waiting and (read := self._file.read(CHUNK)):
            self._waiting = read.lstrip(b"\0")


STREAMS: dict[str, Callable[[bytes], Iterator[bytes]]] = {".gz": _gzip, ".zst": _zstd, ".xz": _xz}
