"""Counter-based random numbers: one independent stream per item, so that items may be generated in any order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")

_WORD = (1 << 64) - 1
# The purpose of a stream is part of its key: item 7 of the demonstrations shares nothing with item 7 of the pairs.
PURPOSES = {"demonstrations": 1, "preferences": 2, "pretrain": 3, "prompts": 4}


class Draws:
    """Uniform draws of item ``index`` for one purpose under ``seed``.

    They are made from raw Philox words, which are the same in every numpy. Philox is the counter-based generator of
    Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
    """

    def __init__(self, seed: int, purpose: str, index: int) -> None:
        key = np.array([seed & _WORD, PURPOSES[purpose]], dtype=np.uint64)
        # The highest counter word holds the item, the lowest counts draws inside it: no stream runs into another.
        counter = np.array([0, 0, 0, index], dtype=np.uint64)
        self._bits = np.random.Philox(key=key, counter=counter)
        self._block: list[int] = []

    def uniform(self) -> float:
        """Draw a float in [0, 1), with 53 random bits."""
        if not self._block:
            self._block = [int(word) for word in self._bits.random_raw(16)]
            self._block.reverse()
        return (self._block.pop() >> 11) * 2.0**-53

    def chance(self, probability: float) -> bool:
        """Return True with the given probability."""
        return self.uniform() < probability

    def below(self, n: int) -> int:
        """Draw an integer in [0, n)."""
        return int(self.uniform() * n)

    def pick(self, options: Sequence[T]) -> T:
        """Draw one of ``options``, each equally likely."""
        return options[self.below(len(options))]

    def sample(self, options: Sequence[T], n: int) -> list[T]:
        """Draw ``n`` of ``options`` without replacement, in random order (fewer when there are fewer)."""
        pool = list(options)
        return [pool.pop(self.below(len(pool))) for _ in range(min(n, len(pool)))]

    def weighted(self, weights: Sequence[tuple[T, float]]) -> T:
        """Draw an option from ``(option, weight)`` pairs in proportion to its weight."""
        mark = self.uniform() * sum(weight for _, weight in weights)
        for option, weight in weights:
            mark -= weight
            if mark < 0:
                return option
        return weights[-1][0]
