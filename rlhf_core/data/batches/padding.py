"""Padding of batches: how much of the computation it takes, and micro-batches that have less of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

MOST_MICRO_BATCHES = 8
# Below this many positions a pass costs nearly as much with fewer of them: the demo's batches of 1,000 took the same
# processor time in one pass and in several.
SMALLEST_MICRO_BATCH = 512
CUT_POSITIONS = 512  # places among the sorted rows at which micro-batches may begin
IMPOSSIBLE = 1 << 50  # positions of a micro-batch that would end before it begins


def padding_share(useful: int, computed: int) -> float:
    """Return the share of computed token positions that hold padding; 0 where nothing was computed.

    Args:
        useful: Tokens that are not padding.
        computed: Positions of all rows, padding included.
    """
    return (computed - useful) / computed if computed else 0.0


@dataclass(frozen=True)
class Partition:
    """Rows in micro-batches, each padded to its own longest row.

    Attributes:
        micro_batches: Row numbers of each.
        computed: Positions of all rows, padding included.
    """

    micro_batches: list[list[int]]
    computed: int


def partitions(lengths: Sequence[int], most: int) -> list[Partition]:
    """Return the partitions of rows into 1, 2, ... ``most`` micro-batches that need the fewest positions.

    A single micro-batch keeps the rows in their order; more of them have the rows sorted by length.

    Args:
        lengths: Tokens of each row.
        most: The largest number of micro-batches; at most the number of rows.
    """
    order = np.argsort(np.asarray(lengths), kind="stable")
    ends = np.unique(np.linspace(0, len(order), min(len(order), max(CUT_POSITIONS, most)) + 1).astype(int))
    longest = np.asarray(lengths)[order[ends[1:] - 1]]
    # positions[i, j]: those of one micro-batch from the i-th cut to the (j + 1)-th.
    positions = (ends[None, 1:] - ends[:-1, None]) * longest[None, :]
    positions = np.where(np.triu(np.ones_like(positions, dtype=bool)), positions, IMPOSSIBLE)
    fewest = positions[0]
    begins: list[np.ndarray] = []
    best = [Partition([list(range(len(order)))], int(fewest[-1]))]
    while len(best) < most:
        # The last micro-batch begins at cut i + 1, where the rows before it are cut as well as possible.
        totals = fewest[:-1, None] + positions[1:, :]
        begins.append(totals.argmin(axis=0) + 1)
        fewest = totals.min(axis=0)
        cuts = [len(ends) - 1]
        for begin in reversed(begins):
            cuts.append(int(begin[cuts[-1] - 1]))
        bounds = [0, *ends[cuts[::-1]].tolist()]
        rows = [order[a:b].tolist() for a, b in pairwise(bounds)]
        best.append(Partition(rows, int(fewest[-1])))
    return best


def least_padded(shards: Sequence[Sequence[int]], max_padding: float) -> list[Partition]:
    """Return the rows of each rank in micro-batches, as few as keep the padding of all ranks within ``max_padding``.

    All ranks get the same number of micro-batches, because they gather sharded parameters together: at most eight, no
    more than a rank has rows, and on average at least 512 positions each before they are cut.

    Args:
        shards: Tokens of each row, rank by rank.
        max_padding: The bound of :func:`padding_share`; 1 gives one micro-batch.
    """
    whole = sum(len(lengths) * max(lengths) for lengths in shards)
    most = min(MOST_MICRO_BATCHES, whole // (len(shards) * SMALLEST_MICRO_BATCH), *map(len, shards))
    useful = sum(map(sum, shards))
    choices = list(zip(*(partitions(lengths, max(most, 1)) for lengths in shards), strict=True))
    for choice in choices:
        if padding_share(useful, sum(part.computed for part in choice)) <= max_padding:
            return list(choice)
    return list(choices[-1])
