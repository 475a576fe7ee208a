"""What a data card consists of: sections of text, tables and histograms, for any renderer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Histogram:
    """How many lengths lie in (2^(i-1), 2^i] for every i from the first to the last that is needed."""

    title: str
    edges: tuple[int, ...]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, title: str, lengths: npt.NDArray[np.int64]) -> Histogram:
        """Count ``lengths``, of which there must be one at least; an empty text counts as one character."""
        exponents = np.ceil(np.log2(np.maximum(lengths, 1))).astype(int)
        first, counts = int(exponents.min()), np.bincount(exponents - exponents.min())
        return cls(title, tuple(2 ** (first + i) for i in range(len(counts))), tuple(counts.tolist()))


@dataclass(frozen=True)
class CardTable:
    """A table; cells are text, numbers are aligned to the right."""

    header: tuple[str, ...]
    rows: Sequence[tuple[str | float | int | None, ...]]

    @property
    def numeric(self) -> list[bool]:
        """By column, whether it holds no text and is aligned to the right, with its heading."""
        columns = range(len(self.header))
        return [bool(self.rows) and not any(isinstance(row[column], str) for row in self.rows) for column in columns]


@dataclass(frozen=True)
class CardSection:
    """A heading with what follows it. ``quotes_rows`` says that texts of the data are quoted in it."""

    title: str
    notes: Sequence[str] = ()
    tables: Sequence[CardTable] = ()
    histograms: Sequence[Histogram] = ()
    quotes_rows: bool = False


@dataclass(frozen=True)
class DataCard:
    """The whole card: ``verdict`` is that of the data gate."""

    passed: bool
    verdict: str
    sections: list[CardSection] = field(default_factory=list)
