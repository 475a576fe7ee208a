"""Batches of whole prompts: pairs of one prompt share a batch, and a sequence that several of them have counts once.

With K ranked replies to a prompt there are up to K(K-1)/2 pairs, but only K sequences to compute (Ouyang et al., 2022,
"Training language models to follow instructions", section 3.5, who also find that pairs drawn one by one overfit).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rlhf_core.config.reward import PairBatchConfig
from rlhf_core.data.batching import epoch_order
from rlhf_core.data.pairs import TokenisedPair

WINDOW = 16  # prompts whose batches are made together, longest first

SequenceKey = tuple[tuple[int, ...], tuple[int, ...]]


def sequence_keys(pairs: Sequence[TokenisedPair]) -> list[SequenceKey]:
    """Prompt and reply of each pair's chosen sequence, then of each pair's rejected one: (2B,)."""
    prompts = [tuple(pair.prompt) for pair in pairs]
    replies = [tuple(pair.chosen) for pair in pairs] + [tuple(pair.rejected) for pair in pairs]
    return list(zip(prompts + prompts, replies, strict=True))


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
        numbers: dict[SequenceKey, int] = {}
        of_sequence = [numbers.setdefault(key, len(numbers)) for key in sequence_keys(pairs)]
        self.sequences = list(zip(of_sequence[: len(pairs)], of_sequence[len(pairs) :], strict=True))
        prompts: dict[tuple[int, ...], int] = {}
        self.prompt = [prompts.setdefault(tuple(pair.prompt), len(prompts)) for pair in pairs]

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
