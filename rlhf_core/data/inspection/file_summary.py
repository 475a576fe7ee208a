"""What is to be known of the rows of a file, taken part by part: counts, reasons, lengths, examples, a sample."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rlhf_core.data.chunks import bytes_in_memory
from rlhf_core.data.collection.rows import FileRows
from rlhf_core.data.tokens.lengths import LengthPercentiles, character_counts, evenly_spread

# Rows that are kept to count tokens and to tell the language: at least so many of a file that has them, fewer where
# twice as many are larger than that.
SAMPLED_ROWS = 2000
SAMPLED_BYTES = 256 * 2**20


@dataclass
class RefusalCount:
    """How many rows were refused for a reason, and the position of the first."""

    rows: int
    first: int


@dataclass
class EvenSample:
    """Rows that are evenly spread over a file of unknown length: every ``stride``-th, which doubles as they grow."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    stride: int = 1
    total: int = 0
    size: int = 0

    def add(self, rows: Sequence[dict[str, Any]], positions: Sequence[int]) -> None:
        """Take in the next rows of the file, with their positions there."""
        for row, position in zip(rows, positions, strict=True):
            if self.total % self.stride == 0:
                self.rows.append(row | {"position": position})
                self.size += bytes_in_memory(row)
            self.total += 1
            while len(self.rows) > 2 * SAMPLED_ROWS or (self.size > SAMPLED_BYTES and len(self.rows) > 1):
                self.rows = self.rows[::2]
                self.size = sum(map(bytes_in_memory, self.rows))
                self.stride *= 2

    def spread(self) -> list[dict[str, Any]]:
        """Return up to ``SAMPLED_ROWS`` rows of the whole file, each with its ``position``."""
        return [self.rows[i] for i in evenly_spread(len(self.rows), SAMPLED_ROWS)] if self.rows else []


@dataclass
class FileSummary:
    """A file as it was read; see :class:`~rlhf_core.data.collection.rows.FileRows` for the counts.

    Attributes:
        format: The name of its format.
        examples: The first rows, as many as were asked for.
        refusals: By reason.
        characters: By text column, the characters of every row, part by part.
        sample: Some of the rows.
    """

    kind: str
    format: str
    wanted_examples: int
    records: int = 0
    rows: int = 0
    expanded: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    unused: Counter[str] = field(default_factory=Counter)
    refusals: dict[str, RefusalCount] = field(default_factory=dict)
    examples: list[dict[str, Any]] = field(default_factory=list)
    characters: dict[str, list[npt.NDArray[np.int64]]] = field(default_factory=dict)
    sample: EvenSample = field(default_factory=EvenSample)

    def add(self, part: FileRows) -> None:
        """Take in the next part of the file."""
        self.records += part.records
        self.rows += len(part.rows)
        self.expanded += part.expanded
        self.dropped += part.dropped
        self.unused += part.unused
        for refused in part.refused:
            count = self.refusals.setdefault(refused["reason"], RefusalCount(0, refused["position"]))
            count.rows += 1
        self.examples += part.rows[: self.wanted_examples - len(self.examples)]
        for name, lengths in character_counts(self.kind, part.rows).items():
            self.characters.setdefault(name, []).append(np.array(lengths, np.int64))
        self.sample.add(part.rows, part.positions)

    def commonest_refusals(self) -> list[tuple[str, RefusalCount]]:
        """Return the reasons of refused rows, commonest first."""
        return sorted(self.refusals.items(), key=lambda item: -item[1].rows)

    def character_lengths(self) -> list[LengthPercentiles]:
        """Return percentiles of the characters of each text column; none without rows."""
        return [
            LengthPercentiles.of(name, np.concatenate(parts).tolist())
            for name, parts in self.characters.items()
            if sum(map(len, parts))
        ]


def texts_of(row: Mapping[str, Any]) -> list[str]:
    """Return the texts of a row of any kind: the turns of its prompt, its replies, or its text."""
    turns = [str(turn["content"]) for turn in row.get("prompt") or ()]
    return [*turns, *(str(row[name]) for name in ("chosen", "rejected", "reply", "text") if name in row)]
