"""Correlations of two samples, with a value where there is nothing to correlate."""

from __future__ import annotations

import numpy as np


def rank_correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Spearman's rank correlation of two (n,) arrays, ties by average rank.

    Pairs with a value that is not finite are left out; the result is 0 when either side is constant.
    """
    from scipy.stats import spearmanr

    a, b = _varying(first, second)
    return float(spearmanr(a, b).statistic) if len(a) else 0.0


def linear_correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Pearson's correlation of two (n,) arrays.

    Pairs with a value that is not finite are left out; the result is 0 when either side is constant.
    """
    from scipy.stats import pearsonr

    a, b = _varying(first, second)
    return float(pearsonr(a, b).statistic) if len(a) else 0.0


def _varying(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The finite pairs as float64; none when either side is constant."""
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    finite = np.isfinite(a) & np.isfinite(b)
    a, b = a[finite], b[finite]
    constant = not len(a) or bool((a == a[0]).all() or (b == b[0]).all())
    return (a[:0], b[:0]) if constant else (a, b)
