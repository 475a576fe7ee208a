"""Orders and batches as pure functions of (seed, epoch), so that a resumed run sees the same ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def epoch_order(n: int, seed: int, epoch: int) -> list[int]:
    """Return a permutation of ``range(n)``, the same for the same (seed, epoch) on every machine."""
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(n).tolist()


def batch_at(n: int, size: int, seed: int, step: int) -> list[int]:
    """Return the full batch of optimiser step ``step`` (from 0) in an endless stream of consecutive epochs.

    A batch may span two epochs, so all batches have ``size`` indices and the step number alone is the data cursor.
    """
    if n < 1:
        raise ValueError("there is nothing to draw a batch from")
    first = step * size
    indices: list[int] = []
    for epoch in range(first // n, (first + size - 1) // n + 1):
        start = epoch * n
        order = epoch_order(n, seed, epoch)
        indices += order[max(first - start, 0) : min(first + size - start, n)]
    return indices


def token_budget_batches(
    lengths: Sequence[int],
    budget: int,
    min_pairs: int,
    max_pairs: int,
    seed: int,
    epoch: int,
    rows: Sequence[int] | None = None,
) -> list[list[int]]:
    """Return an epoch of dynamic batches (paper, section 4.1): as many pairs as fit ``budget`` tokens after padding.

    A batch of b pairs costs ``2 * b * max(length)``. Pairs of similar length share a batch: the shuffled epoch is
    sorted by length within windows, and the batches are shuffled again, so that length does not follow the step number.
    Every index occurs exactly once per epoch, or those of ``rows`` do.

    Args:
        lengths: Tokens of one padded row of each pair, that is of the longer of its two sequences.
        budget: Most tokens of a batch, padding included.
        min_pairs: Fewest pairs of a batch, even over the budget: the gradient of a smaller batch is noise.
        max_pairs: Most pairs of a batch.
        seed: Seed of the order.
        epoch: Number of the epoch, from 0.
        rows: The pairs of this epoch; None for all.
    """
    if not 1 <= min_pairs <= max_pairs:
        raise ValueError(f"need 1 <= min_pairs <= max_pairs, got {min_pairs} and {max_pairs}")
    order = epoch_order(len(lengths) if rows is None else len(rows), seed, epoch)
    if rows is not None:
        order = [rows[i] for i in order]
    window = max_pairs * 8
    batches: list[list[int]] = []
    rest: list[int] = []
    for start in range(0, len(order), window):
        # Longest first, so that the first pair of a batch fixes its width.
        waiting = sorted([*rest, *order[start : start + window]], key=lambda i: (-lengths[i], i))
        full, rest = _fill(waiting, lengths, budget, min_pairs, max_pairs)
        batches += full
    if rest:
        _place_remainder(batches, rest, min_pairs, max_pairs)
    # A second stream (offset key) for the order of batches.
    shuffled = np.random.Generator(np.random.Philox(key=[seed + (1 << 32), epoch])).permutation(len(batches))
    return [batches[i] for i in shuffled]


def _fill(
    waiting: Sequence[int], lengths: Sequence[int], budget: int, min_pairs: int, max_pairs: int
) -> tuple[list[list[int]], list[int]]:
    """Return full batches from the front of ``waiting`` (longest first), and the pairs that are left over."""
    batches: list[list[int]] = []
    start = 0
    while start < len(waiting):
        room = budget // (2 * max(lengths[waiting[start]], 1))
        size = max(min(room, max_pairs), min_pairs)
        if start + size > len(waiting):
            break
        batches.append(list(waiting[start : start + size]))
        start += size
    return batches, list(waiting[start:])


def _place_remainder(batches: list[list[int]], rest: list[int], min_pairs: int, max_pairs: int) -> None:
    """Append the last pairs of an epoch; fewer than ``min_pairs`` borrow from the batch before, or join it."""
    missing = min_pairs - len(rest)
    if missing <= 0 or not batches:
        batches.append(rest)
    elif len(batches[-1]) - missing >= min_pairs:
        batches.append([*batches[-1][-missing:], *rest])
        del batches[-2][-missing:]
    elif len(batches[-1]) + len(rest) <= max_pairs:
        batches[-1] += rest
    else:
        batches.append(rest)
