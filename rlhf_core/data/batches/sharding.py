"""Which rows of a global batch this rank computes; all ranks together compute each row exactly once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TypeVar

from torch import Tensor

from rlhf_core.runtime import distributed

Rows = TypeVar("Rows", list[int], Tensor)
Result = TypeVar("Result")


def passes(rows: Rows, size: int) -> Iterator[tuple[Rows, float]]:
    """Yield this rank's share of ``rows`` in micro-batches of at most ``size``, each with the weight of its loss.

    Every rank makes the same number of passes, because all ranks gather sharded parameters together: a rank that has
    run out of rows gets the first row again with weight 0. All other weights are 1.
    """
    mine = distributed.shard_for_rank(rows)
    count = math.ceil(math.ceil(len(rows) / distributed.world_size()) / size)
    for start in range(0, count * size, size):
        part = mine[start : start + size]
        yield (part, 1.0) if len(part) else (rows[:1], 0.0)


def whole_passes(rows: list[int], size: int) -> Iterator[tuple[list[int], float]]:
    """Yield this rank's share of the micro-batches that one process makes of ``rows``, as :func:`passes` does.

    A row has the same companions, and with them the same padding and the same bits, on any number of ranks. Every rank
    makes as many passes as in :func:`passes`, but of a last round of them some ranks may have none of their own.
    """
    parts = [rows[start : start + size] for start in range(0, len(rows), size)]
    mine = distributed.shard_for_rank(parts)
    for number in range(math.ceil(len(parts) / distributed.world_size())):
        yield (mine[number], 1.0) if number < len(mine) else (rows[:1], 0.0)


def gather_passes(own: Sequence[Sequence[Result]]) -> list[Result]:
    """What all ranks computed of the rows of :func:`whole_passes`, in the order of the rows, on every rank.

    Args:
        own: JSON values of this rank, a list for each pass whose weight was 1.
    """
    return list(chain.from_iterable(distributed.gather_items(own)))
