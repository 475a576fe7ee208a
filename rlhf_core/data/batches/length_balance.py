"""Length-balanced pairs: the preferred reply is as often the shorter as the longer one, at every length difference.

Annotators tend to prefer the longer reply, and a reward model learns it (Singhal et al., 2023, "A Long Way to Go:
Investigating Length Correlations in RLHF", who balance preference data as one remedy). Among balanced pairs no rule
that reads lengths alone is right in more than about half. Equal numbers of both kinds are not enough for that: large
differences occur almost only where the longer reply is preferred, so that "longer, if it is much longer" would still be
right. Both kinds are therefore matched within strata of the absolute difference.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

MOST_STRATA = 10
SMALLEST_STRATUM = 20


def length_balanced_rows(differences: npt.ArrayLike, seed: int, draw: int = 0) -> list[int]:
    """Draw equally many pairs of either kind from each stratum: all of the rarer kind, as many of the other.

    Strata are quantiles of the absolute difference: ten, or fewer where they would hold less than twenty pairs.

    Args:
        differences: Length of the chosen minus that of the rejected reply, (B,).
        seed: Seed of the draws.
        draw: Number of the draw; each is independent of the others.

    Returns:
        Row numbers in ascending order. Pairs of equal length are of neither kind and are left out.
    """
    difference = np.asarray(differences)
    size = np.abs(difference)
    unequal = size[size > 0]
    if not len(unequal):
        return []
    strata = min(MOST_STRATA, max(1, len(unequal) // SMALLEST_STRATUM))
    stratum = np.searchsorted(np.quantile(unequal, np.arange(1, strata) / strata), size)
    generator = np.random.Generator(np.random.Philox(key=[seed, draw]))
    rows: list[int] = []
    for number in range(strata):
        kinds = [np.flatnonzero((stratum == number) & (difference * sign > 0)) for sign in (1, -1)]
        count = min(len(kind) for kind in kinds)
        rows += [row for kind in kinds for row in generator.permutation(kind)[:count].tolist()]
    return sorted(rows)


def length_balanced_epoch(differences: npt.ArrayLike, seed: int, epoch: int) -> list[int]:
    """Draw the pairs of one epoch of training: balanced ones, anew in each epoch, and all pairs of equal length."""
    ties = np.flatnonzero(np.asarray(differences) == 0).tolist()
    return sorted([*length_balanced_rows(differences, seed, epoch), *ties])
