"""Bytes of a model whose linear layers are held in 4 bits under adapters (models/nf4.py)."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_core.memory.shapes import Shape

# A scale of 8 bits for 64 values, one of float32 for 256 of those; per matrix the values of both codes and an offset.
BLOCK, OUTER_BLOCK, FLOAT32 = 64, 256, 4
TABLES = (16 + 256 + 1) * FLOAT32
MATRICES = 7


@dataclass(frozen=True)
class Packed:
    """``parameters`` in 4 bits take ``size`` bytes; a pass unpacks one matrix at a time, of at most ``largest``."""

    parameters: int
    size: int
    largest: int

    def unpacked(self, element: int) -> int:
        """Bytes of the largest matrix in use, with its scales as float32."""
        return self.largest * element + self.largest // BLOCK * FLOAT32


def packed_layers(shape: Shape) -> Packed:
    """All linear layers below the head."""
    count = shape.linear
    scales = count // BLOCK + count // (BLOCK * OUTER_BLOCK) * FLOAT32
    size = count // 2 + scales + shape.layers * MATRICES * TABLES
    return Packed(count, size, shape.hidden * max(shape.intermediate, shape.query_width))
