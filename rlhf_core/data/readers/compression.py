"""Decompress data files by their suffix."""

from __future__ import annotations

import gzip
import lzma
import zlib

import pyarrow as pa

from rlhf_core.errors import DataError

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".xz": "xz"}


def decompressed(name: str, content: bytes, suffix: str) -> bytes:
    """Return ``content`` decompressed as ``suffix`` says; as it is where that is empty.

    Raises:
        DataError: It is no such file, or not the whole of it.
    """
    if not suffix or not content:
        return content
    try:
        if suffix == ".gz":
            return gzip.decompress(content)
        if suffix == ".xz":
            return lzma.decompress(content)
        return bytes(pa.CompressedInputStream(pa.BufferReader(content), "zstd").read())
    except (EOFError, OSError, zlib.error, lzma.LZMAError, pa.ArrowException) as error:
        raise DataError(
            f"{name} is not a whole {COMPRESSIONS[suffix]} file ({error}); copy or download it again"
        ) from error
