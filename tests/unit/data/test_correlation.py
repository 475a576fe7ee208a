"""Correlations by hand, by their invariances, and where there is nothing to correlate."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import rankdata

from rlhf_core.data.correlation import linear_correlation, rank_correlation

PAIRS = st.lists(st.tuples(st.integers(-9, 9), st.integers(-9, 9)), min_size=1, max_size=30)


def test_by_hand() -> None:
    first = np.array([1.0, 2.0, 3.0, 4.0])
    assert rank_correlation(first, np.exp(first)) == pytest.approx(1.0)
    assert rank_correlation(first, -first) == pytest.approx(-1.0)
    # d = 1, -1, 1, -1: 1 - 6 * 4 / (4 * 15) = .6
    assert rank_correlation(first, np.array([2.0, 1.0, 4.0, 3.0])) == pytest.approx(0.6)
    # deviations -1.5, -.5, .5, 1.5 and 0, 0, 0, 1 minus .25: .75 * 2 / sqrt(5 * .75)
    assert linear_correlation(first, np.array([0.0, 0.0, 0.0, 1.0])) == pytest.approx(1.5 / np.sqrt(3.75))


@given(PAIRS)
def test_ranks_with_ties_share_their_mean(pairs: list[tuple[int, int]]) -> None:
    first, second = (np.array(column, dtype=float) for column in zip(*pairs, strict=True))
    expected = linear_correlation(rankdata(first), rankdata(second))
    assert rank_correlation(first, second) == pytest.approx(expected, abs=1e-12)
    assert -1.0 - 1e-12 <= expected <= 1.0 + 1e-12


@pytest.mark.parametrize("correlation", [rank_correlation, linear_correlation])
def test_constant_or_missing_values(correlation) -> None:
    first = np.array([1.0, 2.0, 3.0, 4.0])
    assert correlation(first, np.ones(4)) == 0.0
    assert correlation(first[:1], first[:1]) == 0.0 and correlation(first[:0], first[:0]) == 0.0
    holed = np.array([np.nan, 2.0, 3.0, np.inf])
    assert correlation(holed, first) == pytest.approx(1.0)
