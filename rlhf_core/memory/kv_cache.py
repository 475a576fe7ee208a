"""Bytes of the key-value cache while replies are sampled."""

from __future__ import annotations

from rlhf_core.memory.placement import Placement
from rlhf_core.memory.shapes import Shape


def kv_cache(shape: Shape, rows: int, width: int, placement: Placement) -> int:
    """Keys and values of ``width`` tokens of ``rows`` sequences: 2 x layers x K x e each."""
    return 2 * shape.layers * shape.kv_width * placement.element * rows * width


def growing_copy(shape: Shape, rows: int, width: int, placement: Placement) -> int:
    """The cache of a layer is copied whenever a token is appended: one layer's keys exist twice for a moment."""
    return shape.kv_width * placement.element * rows * width
