"""Mixtures by category: which rows, and how often, an epoch of training consists of.

Rows of categories without a share come once. Those with one are repeated, or drawn, until they have it: a few hundred
pairs about safety can weigh as much as was meant beside thousands of others (Bai et al., 2022, "Training a Helpful and
Harmless Assistant", section 4.4, mix helpfulness and harmlessness by such weights).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rlhf_core.errors import DataError


def rows_by_category_share(
    categories: Sequence[str],
    shares: Mapping[str, float],
    seed: int,
    epoch: int,
    parameter: str,
    rows: Sequence[int] | None = None,
) -> list[int]:
    """Return the row numbers of an epoch in ascending order; a row of a category with a share may be there repeatedly.

    Of ``n`` rows that have to be ``m``, each comes ``m // n`` times, and ``m % n`` drawn ones once more.

    Args:
        categories: The category of every row there is.
        shares: By category its share of the epoch, in sum below 1.
        seed: Seed of the draws; each epoch has its own.
        epoch: Number of the epoch, from 0.
        parameter: The parameter that has the shares, for messages.
        rows: The rows to choose from; None for all.

    Raises:
        DataError: A category with a share has no row, or no other has one.
    """
    numbers = list(range(len(categories))) if rows is None else list(rows)
    if not shares:
        return numbers
    of_category = {name: [row for row in numbers if categories[row] == name] for name in shares}
    others = [row for row in numbers if categories[row] not in shares]
    lacking = next((name for name, listed in of_category.items() if not listed), None)
    if lacking is not None:
        known = ", ".join(sorted({categories[row] for row in numbers})) or "none"
        raise DataError(
            f"{parameter} names the category {lacking}, of which there is no usable row in training; there are: {known}"
        )
    if not others:
        raise DataError(f"{parameter} names all categories of the rows; leave one out, which gets the rest")
    total = len(others) / (1 - sum(shares.values()))
    chosen = list(others)
    generator = np.random.Generator(np.random.Philox(key=[seed, epoch]))
    for name, share in shares.items():
        listed = of_category[name]
        repeats, drawn = divmod(max(1, round(share * total)), len(listed))
        chosen += listed * repeats + [listed[i] for i in generator.permutation(len(listed))[:drawn]]
    return sorted(chosen)
