"""Which rows of a global batch this rank computes; all ranks together compute each row exactly once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TypeVar

from torch import Tensor

from rlhf_core.runtime import distributed

Rows = TypeVar("Rows", list[int], Tensor)


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
