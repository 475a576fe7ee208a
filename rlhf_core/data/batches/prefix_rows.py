"""Prefix rows: replies to one prompt in one row behind a single copy of it, so that the prompt is computed once.

Wang and Hegde, 2024, "Accelerating Direct Preference Optimization with Prefix Sharing".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_core.data.batches.prompt_batches import PairSequences, ids_hash

# Attention takes the square of a row: with more replies it would cost more than the copies of the prompt it saves.
MOST_REPLIES = 4


@dataclass(frozen=True)
class PrefixRow:
    """A prompt and replies to it, of which each sees the prompt and itself.

    Attributes:
        numbers: Number of the sequence that each reply makes with the prompt.
    """

    prompt: Sequence[int]
    replies: list[Sequence[int]]
    numbers: list[int]

    @property
    def length(self) -> int:
        """Tokens of the row."""
        return len(self.prompt) + sum(map(len, self.replies))


def rows_of_sequences(sequences: PairSequences, prefix_sharing: bool) -> list[PrefixRow]:
    """Return what is padded together: a row for each sequence, or for up to four of them that have the same prompt."""
    if not prefix_sharing:
        return [PrefixRow(prompt, [reply], [i]) for i, (prompt, reply) in enumerate(sequences.distinct)]
    rows: list[PrefixRow] = []
    open_rows: dict[bytes, PrefixRow] = {}
    for number, (prompt, reply) in enumerate(sequences.distinct):
        row = open_rows.get(key := ids_hash(prompt))
        if row is None or len(row.replies) == MOST_REPLIES:
            open_rows[key] = row = PrefixRow(prompt, [], [])
            rows.append(row)
        row.replies.append(reply)
        row.numbers.append(number)
    return rows
