"""Batches of whole prompts: pairs of one prompt share a batch, and a sequence that several of them have counts once.

With K ranked replies to a prompt there are up to K(K-1)/2 pairs, but only K sequences to compute (Ouyang et al., 2022,
"Training language models to follow instructions", section 3.5, who also find that pairs drawn one by one overfit).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from rlhf_core.config.reward import PairBatchConfig
from rlhf_core.data.batches.batching import epoch_order
from rlhf_core.data.batches.pairs import TokenisedPair

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
            units = [unit for number in order[start : start + WINDOW] for unit in self._units(prompts[number])]
            batches += self._fill(sorted(units, key=lambda unit: -unit.width))
        # A second stream (offset key) for the order of batches.
        shuffled = np.random.Generator(np.random.Philox(key=[self.seed + (1 << 32), epoch])).permutation(len(batches))
        return [batches[number] for number in shuffled]

    def _units(self, rows: Sequence[int]) -> Iterator[_Unit]:
        """Cut the pairs of one prompt where they exceed a batch."""
        unit = _Unit([], set(), 0)
        for row in sorted(rows, key=lambda row: -self.widths[row]):
            added = _Unit([row], set(self.sequences[row]), self.widths[row])
            if unit.rows and not self._fits(unit, added):
                yield unit
                unit = added
            else:
                unit = _joined(unit, added)
        yield unit

    def _fill(self, units: Sequence[_Unit]) -> Iterator[list[int]]:
        batch = units[0]
        for unit in units[1:]:
            if self._fits(batch, unit):
                batch = _joined(batch, unit)
            else:
                yield batch.rows
                batch = unit
        yield batch.rows

    def _fits(self, first: _Unit, second: _Unit) -> bool:
        both = _joined(first, second)
        if len(first.rows) < self.limits.min_pairs:
            return True
        tokens = len(both.sequences) * both.width
        return len(both.rows) <= self.limits.max_pairs and tokens <= self.limits.token_budget


def _joined(first: _Unit, second: _Unit) -> _Unit:
    return _Unit(first.rows + second.rows, first.sequences | second.sequences, max(first.width, second.width))
