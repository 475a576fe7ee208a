"""Preference pairs as token ids, in batches of whole prompts, with rows for shared prefixes.

Batches of whole prompts: pairs of one prompt share a batch, and a sequence that several of them have counts once.

With K ranked replies to a prompt there are up to K(K-1)/2 pairs, but only K sequences to compute (Ouyang et al., 2022,
"Training language models to follow instructions", section 3.5, who also find that pairs drawn one by one overfit).

Prefix rows: replies to one prompt in one row behind a single copy of it, so that the prompt is computed once.

Wang and Hegde, 2024, "Accelerating Direct Preference Optimization with Prefix Sharing".
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from rlhf_core.config.reward import PairBatchConfig
from rlhf_core.data.batches import epoch_order
from rlhf_core.data.tables import TableRows
from rlhf_core.data.token_tables import CATEGORY, TokenTable


@dataclass(frozen=True, slots=True)
class TokenisedPair:
    """Token ids of a pair; the replies end with the token that closes a turn.

    ``row`` is its position in the input.
    """

    row: int
    prompt: Sequence[int]
    chosen: Sequence[int]
    rejected: Sequence[int]
    category: str = "general"

    @property
    def length(self) -> int:
        """Tokens of the longer of the two sequences: the width that this pair needs in a padded batch."""
        return len(self.prompt) + max(len(self.chosen), len(self.rejected))

    @property
    def length_difference(self) -> int:
        """Tokens of the chosen minus those of the rejected reply."""
        return len(self.chosen) - len(self.rejected)


def usable_pairs(tokens: TokenTable, max_tokens: int) -> tuple[TableRows[TokenisedPair], dict[str, int]]:
    """Drop the pairs that training cannot use.

    A pair is over-long when prompt + either reply exceeds ``max_tokens``: cutting the end of a reply would remove the
    token that the reward is read at. A pair is identical when both replies have the same tokens (their texts may
    differ, for example in characters that the tokenizer normalises): its loss is log 2 for every model.

    Returns:
        The usable pairs, and how many were dropped: ``{"over_long": …, "identical": …}``. Of the over-long ones
        ``identical_if_cut`` counts those that would be identical if they were cut at ``max_tokens``.
    """
    prompt, chosen, rejected = (tokens.column(name) for name in ("prompt", "chosen", "rejected"))
    length = prompt.lengths + np.maximum(chosen.lengths, rejected.lengths)
    identical = np.zeros(len(tokens), dtype=bool)
    for row in np.flatnonzero(chosen.lengths == rejected.lengths).tolist():
        identical[row] = chosen[row] == rejected[row]
    over_long = (length > max_tokens) & ~identical
    identical_if_cut = 0
    for row in np.flatnonzero(over_long).tolist():
        room = max(max_tokens - int(prompt.lengths[row]), 0)
        identical_if_cut += chosen[row][:room] == rejected[row][:room]
    dropped = {
        "over_long": int(over_long.sum()),
        "identical": int(identical.sum()),
        "identical_if_cut": identical_if_cut,
    }
    categories = tokens.table.column(CATEGORY)

    def pairs(rows: npt.NDArray[np.int64]) -> list[TokenisedPair]:
        ids = ((row, prompt[row], chosen[row], rejected[row]) for row in rows.tolist())
        return [TokenisedPair(*of_row, categories[of_row[0]].as_py()) for of_row in ids]

    return TableRows(np.flatnonzero(~identical & ~over_long), pairs), dropped


WINDOW = 16  # prompts whose batches are made together, longest first


@dataclass(frozen=True)
class PairSequences:
    """The sequences of B pairs.

    Attributes:
        distinct: Prompt and reply of each sequence, in the order of first occurrence: chosen ones come first.
        chosen: Number of each pair's chosen sequence (B,).
        rejected: Number of each pair's rejected sequence (B,).
    """

    distinct: list[tuple[Sequence[int], Sequence[int]]]
    chosen: list[int]
    rejected: list[int]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each distinct sequence."""
        return [len(prompt) + len(reply) for prompt, reply in self.distinct]


def pair_sequences(pairs: Sequence[TokenisedPair], share: bool = True) -> PairSequences:
    """Number the sequences of pairs; with ``share`` one that several pairs have gets one number."""
    listed = [(pair.prompt, pair.chosen) for pair in pairs] + [(pair.prompt, pair.rejected) for pair in pairs]
    if not share:
        return PairSequences(listed, list(range(len(pairs))), list(range(len(pairs), len(listed))))
    known: dict[bytes, int] = {}
    numbers: list[int] = []
    distinct: list[tuple[Sequence[int], Sequence[int]]] = []
    for sequence in listed:
        number = known.setdefault(b"".join(map(ids_hash, sequence)), len(known))
        if number == len(distinct):
            distinct.append(sequence)
        numbers.append(number)
    return PairSequences(distinct, numbers[: len(pairs)], numbers[len(pairs) :])


def ids_hash(ids: Sequence[int]) -> bytes:
    """Return a 128-bit hash of token ids."""
    return blake2b(array("i", ids).tobytes(), digest_size=16).digest()


@dataclass(frozen=True)
class _Unit:
    """Pairs of one prompt that fit a batch; ``width`` is the length of their longest sequence."""

    rows: list[int]
    sequences: set[int]
    width: int


class PromptBatches:
    """Epochs of batches within a token budget of ``distinct sequences x longest``; functions of seed and epoch."""

    def __init__(self, pairs: Sequence[TokenisedPair], limits: PairBatchConfig, seed: int) -> None:
        self.limits, self.seed = limits, seed
        self.widths = [pair.length for pair in pairs]
        sequences = pair_sequences(pairs)
        self.sequences = list(zip(sequences.chosen, sequences.rejected, strict=True))
        prompts: dict[bytes, int] = {}
        self.prompt = [prompts.setdefault(ids_hash(pair.prompt), len(prompts)) for pair in pairs]

    def epoch(self, epoch: int, rows: Sequence[int] | None = None) -> list[list[int]]:
        """Every pair once, or every pair of ``rows``, batch by batch."""
        of_prompt: dict[int, list[int]] = {}
        for row in range(len(self.widths)) if rows is None else rows:
            of_prompt.setdefault(self.prompt[row], []).append(row)
        prompts = list(of_prompt.values())
        order = epoch_order(len(prompts), self.seed, epoch)
        batches: list[list[int]] = []
        for start in range(0, len(order), WINDOW):
            units: list[_Unit] = []
            for number in order[start : start + WINDOW]:  # the pairs of one prompt are cut where they exceed a batch
                longest_first = sorted(prompts[number], key=lambda row: -self.widths[row])
                pairs = [_Unit([row], {*self.sequences[row]}, self.widths[row]) for row in longest_first]
                units += self._packed(pairs)
            batches += [unit.rows for unit in self._packed(sorted(units, key=lambda unit: -unit.width))]
        # A second stream (offset key) for the order of batches.
        return [batches[number] for number in epoch_order(len(batches), self.seed + (1 << 32), epoch)]

    def _packed(self, units: Sequence[_Unit]) -> Iterator[_Unit]:
        """Join neighbours as long as they fit a batch."""
        packed = units[0]
        for unit in units[1:]:
            rows, sequences = packed.rows + unit.rows, packed.sequences | unit.sequences
            both = _Unit(rows, sequences, max(packed.width, unit.width))
            within = len(rows) <= self.limits.max_pairs and len(sequences) * both.width <= self.limits.token_budget
            if within or len(packed.rows) < self.limits.min_pairs:
                packed = both
            else:
                yield packed
                packed = unit
        yield packed


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
