"""Tokens of clean rows: of every row up to a number, beyond it of rows that are evenly spread over the file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rlhf_core.data.row_counts import RowFinding
from rlhf_core.data.schema import CONTENT_FIELDS
from rlhf_core.data.tokens.lengths import PERCENTILES, LengthPercentiles, evenly_spread, token_counts
from rlhf_core.data.validation.provenance import Origins
from rlhf_core.data.validation.stored_rows import StoredRows
from rlhf_core.errors import UnwritableText
from rlhf_core.runtime.progress import progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNWRITABLE = "writable_by_tokenizer"  # what findings.parquet calls them: no rule, since not every row is looked at
COUNTED_ROWS = 20_000  # of a kind; a percentile of as many is off by less than one per cent of the rows


@dataclass
class KindTokens:
    """Tokens of rows of a kind.

    Attributes:
        rows: How many rows there are.
        looked_at: How many of them were tokenised.
        lengths: By text column, and for the sequence that training sees, the tokens of each row that can be written.
        unwritable: The others, in order.
    """

    rows: int
    looked_at: int = 0
    lengths: dict[str, list[int]] = field(default_factory=dict)
    unwritable: list[RowFinding] = field(default_factory=list)


@dataclass(frozen=True)
class CountedTokens:
    """Tokens of the clean rows by kind, and what the tokenizer that counted them is called."""

    tokenizer: str
    kinds: Mapping[str, KindTokens]

    def metrics(self, kind: str) -> dict[str, float]:
        """Return ``COLUMN_tokens_PERCENTILE`` for each text column of ``kind``, and for the whole sequence."""
        return {
            f"{name.replace(' + ', '_and_')}_tokens_{percentile}": float(value)
            for name, lengths in self.kinds[kind].lengths.items()
            for percentile, value in zip(PERCENTILES, LengthPercentiles.of(name, lengths).values, strict=True)
        }

    def findings(self) -> list[RowFinding]:
        """Return the rows that the tokenizer cannot write, as ``findings.parquet`` holds them."""
        return [finding for counted in self.kinds.values() for finding in counted.unwritable]


def count_tokens(
    clean: Mapping[str, StoredRows], tokenizer: PreTrainedTokenizerBase, name: str, origins: Mapping[str, Origins]
) -> CountedTokens:
    """Tokenise the clean rows as training does, part by part.

    Args:
        name: What the card calls the tokenizer.
        origins: The file and line of every raw row, by kind; none for kinds of no file.
    """
    kinds = {kind: KindTokens(rows.num_rows) for kind, rows in clean.items() if rows.num_rows}
    with progress(sum(min(counted.rows, COUNTED_ROWS) for counted in kinds.values()), "counting tokens") as bar:
        for kind, counted in kinds.items():
            chosen = np.zeros(counted.rows, dtype=bool)
            chosen[evenly_spread(counted.rows, COUNTED_ROWS)] = True
            rows = clean[kind].where(chosen)
            raw_numbers, known = rows.numbers, origins.get(kind)
            for part in rows.parts(["id", *CONTENT_FIELDS[kind]]):
                for number, row in zip(raw_numbers[counted.looked_at :], part.to_pylist(), strict=False):
                    try:
                        tokens = token_counts(tokenizer, kind, row)
                    except UnwritableText as error:
                        origin = vars(known[int(number)]) if known is not None else {}
                        counted.unwritable.append(
                            RowFinding(UNWRITABLE, kind, error.reason, id=row["id"], severity="warn", **origin)
                        )
                        continue
                    for column, count in tokens.items():
                        counted.lengths.setdefault(column, []).append(count)
                counted.looked_at += part.num_rows
                bar.advance(part.num_rows)
    return CountedTokens(name, kinds)
