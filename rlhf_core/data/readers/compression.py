"""Decompress data files by their suffix."""

from __future__ import annotations

import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator

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
    """Yield the parts of all streams; :mod:`lzma` itself would ignore what follows the first if that is none."""
    while content:
        decompressor = lzma.LZMADecompressor()
        yield decompressor.decompress(content, CHUNK)
        while not decompressor.eof:
            if decompressor.needs_input:
                raise EOFError("it ends before the end of the stream")
            yield decompressor.decompress(b"", CHUNK)
        content = decompressor.unused_data.lstrip(b"\0")  # streams may be padded


STREAMS: dict[str, Callable[[bytes], Iterator[bytes]]] = {".gz": _gzip, ".zst": _zstd, ".xz": _xz}
