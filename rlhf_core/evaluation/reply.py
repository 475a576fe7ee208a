"""A reply as metrics and judges see it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reply:
    """A reply's text, whether it ended by itself, and its length in tokens (the ending included)."""

    text: str
    finished: bool
    tokens: int = 0
