"""Clusters of rows that ask the same question: numbers, sums, and intervals of shares.

Replies to one question, in whatever form or number, succeed and fail together. A cluster is the
content of a question in the synthetic world, elsewhere the group that prompts are split by.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import numpy as np
import scipy  # its parts are loaded when they are first used
from numpy.typing import ArrayLike

from rlhf_core.data.schema import Preference, Prompt
from rlhf_core.world.questions import SOURCE as WORLD
from rlhf_core.world.questions import content_of_group

CONFIDENCE = 0.95  # one-sided; two-sided intervals have 2.5 % on each side
FEW = 10  # fewer clusters do not tell how much rows of one differ


def cluster_of(row: Prompt | Preference) -> str:
    """Return what a row's prompt is about: its content in the synthetic world, else its group."""
    return cluster_name(row.group, row.source, row.id)


def cluster_name(group: str, source: str, identity: str) -> str:
    """Return the cluster of a row with these values of the columns group, source and id."""
    if is_of_world(source):
        return content_of_group(group)
    return group or identity


def is_of_world(source: str) -> bool:
    """Return whether rows with this value of the column source were made by the synthetic world."""
    return source.partition(":")[0] == WORLD


def clusters_of(rows: Sequence[Prompt | Preference], repeats: int = 1) -> np.ndarray:
    """Return the number of each row's cluster, ``repeats`` times in a row (n * repeats,)."""
    names = [cluster_of(row) for row in rows]
    return np.repeat(cluster_codes(names), repeats)


def cluster_codes(names: Sequence[Hashable]) -> np.ndarray:
    """Number the clusters by first appearance, (n,)."""
    known: dict[Hashable, int] = {}
    codes = [known.setdefault(name, len(known)) for name in names]
    return np.array(codes, dtype=np.int64)


def one_each(count: int, clusters: ArrayLike | None) -> np.ndarray:
    """Return ``clusters``, or for None a cluster of its own for each row."""
    if clusters is None:
        return np.arange(count)
    return np.asarray(clusters, dtype=np.int64)


def cluster_sums(rows: np.ndarray, clusters: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Add up rows by cluster: (r, n) -> sums (r, k) and sizes (k,)."""
    sizes = np.bincount(clusters).astype(np.float64)
    sums = np.stack([np.bincount(clusters, weights=row) for row in rows])
    held = sizes > 0
    return sums[:, held], sizes[held]


def standard_error(values: np.ndarray, clusters: np.ndarray) -> tuple[float, int]:
    """Return the cluster-robust standard error of a mean (n,), and the number of clusters.

    It is infinite for one cluster.
    """
    deviations = values - values.mean()
    (sums,), sizes = cluster_sums(deviations[np.newaxis], clusters)
    count = len(sizes)
    if count < 2:
        return math.inf, count
    total = float((sums**2).sum())
    variance = total * count / (count - 1)
    return math.sqrt(variance) / len(values), count


def design_effect(values: np.ndarray, clusters: np.ndarray) -> float:
    """Return the factor by which clusters widen the variance of a mean (n,).

    It is from 1 up to that of clusters whose rows are all equal, which is taken where fewer than
    :data:`FEW` clusters are known, or all values are equal.
    """
    error, count = standard_error(values, clusters)
    sizes = np.bincount(clusters)
    largest = float((sizes**2).sum() / len(values))
    independent = float(values.var()) / len(values)
    if count < FEW or not independent > 0:
        return largest
    return min(max(error**2 / independent, 1.0), largest)


def wilson_bounds(share: float, count: float) -> tuple[float, float]:
    """Return 95 % bounds (Wilson, 1927) of a share of ``count`` clusters or independent rows.

    Even the lower bound of 1 is below it. Where a cluster counts in part, its variance is smaller
    than the formula's, and the bounds are too wide.
    """
    z = float(scipy.stats.norm.ppf((1 + CONFIDENCE) / 2))
    squared = z**2
    centre = share + squared / (2 * count)
    variance = share * (1 - share) / count + squared / (4 * count**2)
    half = z * math.sqrt(variance)
    scale = 1 + squared / count
    low = (centre - half) / scale
    high = (centre + half) / scale
    return max(0.0, low), min(1.0, high)
