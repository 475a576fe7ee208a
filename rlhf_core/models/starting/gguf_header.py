"""The header of a GGUF file, read without its weights: keys, tensors, and whether the file is as long as they say.

Source: the specification of the format, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlhf_core.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ARCHITECTURE = "general.architecture"
ALIGNMENT = "general.alignment"
DEFAULT_ALIGNMENT = 32
# Types of values: bytes of the fixed ones by their number in the file, then the two of variable length.
FIXED_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING, ARRAY = 8, 9
INTEGERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 10: "<Q", 11: "<q"}
FETCH_AGAIN = "fetch the file again"


@dataclass(frozen=True)
class GgufTensor:
    """A tensor that the header names: its shape, fastest dimension first, and its place after the header in bytes."""

    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True)
class GgufHeader:
    """What the header of a GGUF file says.

    Attributes:
        values: The keys with their values where those are strings or integers, the lengths of arrays, None for others.
        tensors: By name.
        data_start: Position at which the first tensor may begin.
    """

    values: Mapping[str, str | int | None]
    tensors: Mapping[str, GgufTensor]
    data_start: int

    @property
    def architecture(self) -> str:
        """The name of the architecture; empty where the file has none."""
        return str(self.values.get(ARCHITECTURE) or "")


def read_gguf_header(file: Path) -> GgufHeader:
    """Read the header of ``file``, and check that every tensor that it names lies within the file.

    Raises:
        ModelError: It is not a GGUF file, of another version or byte order, or cut off.
    """
    if file.stat().st_size < len(MAGIC) or _first_bytes(file) != MAGIC:
        raise ModelError(f"{file} is not a GGUF file (its first bytes are not {MAGIC.decode()}); {FETCH_AGAIN}")
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        length = len(content)
        try:
            header = _HeaderReader(content, file).header()
        except (struct.error, IndexError) as error:
            raise ModelError(
                f"{file} is cut off: it ends within its header, after {length} bytes; {FETCH_AGAIN}"
            ) from error
    for name, tensor in header.tensors.items():
        end = header.data_start + tensor.offset + tensor.size
        if end > length:
            raise ModelError(
                f"{file} is cut off: the tensor {name} ends at byte {end}, the file has {length}; {FETCH_AGAIN}"
            )
    return header


def _first_bytes(file: Path) -> bytes:
    with file.open("rb") as opened:
        return opened.read(len(MAGIC))


class _HeaderReader:
    """Reads from the beginning of a file; ``struct.error`` or ``IndexError`` where it ends too early."""

    def __init__(self, content: mmap.mmap, file: Path) -> None:
        self.content, self.file = content, file
        self.position = len(MAGIC)

    def header(self) -> GgufHeader:
        version = self._number("<I")
        if version not in VERSIONS:
            raise ModelError(
                f"{self.file} is of version {version} of GGUF, or of another byte order; versions "
                f"{' and '.join(map(str, VERSIONS))} in little-endian order are read: convert it anew"
            )
        tensors, keys = self._number("<Q"), self._number("<Q")
        values = {}
        for _ in range(keys):
            key = self._string()
            values[key] = self._value(self._number("<I"))
        described = dict(self._tensor() for _ in range(tensors))
        alignment = values.get(ALIGNMENT)
        step = alignment if isinstance(alignment, int) and alignment > 0 else DEFAULT_ALIGNMENT
        return GgufHeader(values, described, -(-self.position // step) * step)

    def _number(self, layout: str) -> int:
        (number,) = struct.unpack_from(layout, self.content, self.position)
        self.position += struct.calcsize(layout)
        return int(number)

    def _skip(self, size: int) -> None:
        self.position += size
        if self.position > len(self.content):
            raise IndexError(self.position)

    def _string(self) -> str:
        start = self.position + 8
        self._skip(8 + struct.unpack_from("<Q", self.content, self.position)[0])
        return self.content[start : self.position].decode("utf-8", errors="replace")

    def _value(self, kind: int) -> str | int | None:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            return self._array()
        if kind in INTEGERS:
            return self._number(INTEGERS[kind])
        self._skip(self._size_of(kind))
        return None

    def _array(self) -> int:
        kind, length = self._number("<I"), self._number("<Q")
        if kind != STRING:
            self._skip(length * self._size_of(kind))
            return length
        for _ in range(length):
            self._skip(8 + struct.unpack_from("<Q", self.content, self.position)[0])
        return length

    def _size_of(self, kind: int) -> int:
        if kind not in FIXED_SIZES:
            raise ModelError(
                f"{self.file} is damaged: its header has a value of the unknown type {kind}; {FETCH_AGAIN}"
            )
        return FIXED_SIZES[kind]

    def _tensor(self) -> tuple[str, GgufTensor]:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        name = self._string()
        shape = tuple(self._number("<Q") for _ in range(self._number("<I")))
        kind, offset = self._number("<I"), self._number("<Q")
        try:
            block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (ValueError, KeyError) as error:
            raise ModelError(
                f"{self.file}: the tensor {name} is quantised in a way (type {kind}) that the package gguf does not "
                f"know; update it, or {FETCH_AGAIN}"
            ) from error
        return name, GgufTensor(shape, offset, math.prod(shape) * block_bytes // block)
