"""The win rate at equal lengths: by hand, against a general optimiser, and its symmetries."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from rlhf_core.evaluation.comparisons.comparison import (
    compare,
    length_controlled_win_rate,
    length_differences,
    rates_at_equal_length,
)
from rlhf_core.evaluation.reply import Reply


def rate_at_equal_length(outcome: np.ndarray, feature: np.ndarray) -> float:
    return float(rates_at_equal_length(outcome, feature, np.ones((1, len(outcome))))[0])


COMPARED = st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(-400, 400)), min_size=1, max_size=40)


def arrays(compared: list[tuple[float, int]]) -> tuple[np.ndarray, np.ndarray]:
    outcome, difference = zip(*compared, strict=True)
    return np.array(outcome), np.array(difference, dtype=np.float64)


def test_by_hand() -> None:
    # Half of the replies are longer by 50 and win 3 of 4, half are as much shorter and win 1 of 4. By symmetry θ is 0:
    # all of the advantage is length, on either side.
    outcome = np.array([1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0])
    longer_by = np.array([50.0] * 4 + [-50.0] * 4)
    assert length_controlled_win_rate(outcome, longer_by, 50, 0)["lc_win_rate"] == pytest.approx(0.5)
    # Of 1,000 pairs 900 are the longer ones: the plain rate is .70, the controlled one still half.
    outcome = np.repeat([1.0, 0.0, 1.0, 0.0], [675, 225, 25, 75])
    longer_by = np.repeat([50.0, 50.0, -50.0, -50.0], [675, 225, 25, 75])
    assert outcome.mean() == pytest.approx(0.70)
    assert length_controlled_win_rate(outcome, longer_by, 2, 0)["lc_win_rate"] == pytest.approx(0.5, abs=0.01)


def test_ties_are_half_wins_by_the_first_order_conditions() -> None:
    # Two pairs at feature 0 and two at 1. With θ the intercept and φ the penalised slope the gradient is zero where
    # Σ(o - p) = 0 and Σ x(o - p) = φ.
    outcome, feature = np.array([1.0, 0.5, 1.0, 0.5]), np.array([0.0, 0.0, 1.0, 1.0])
    assert rate_at_equal_length(outcome, feature) == pytest.approx(0.75)  # both groups win 3 of 4: φ = 0
    outcome = np.array([0.5, 0.5, 1.0, 0.5])
    rate = rate_at_equal_length(outcome, feature)
    theta = math.log(rate / (1 - rate))
    # From the first condition the longer two have p = (2.5 - 2 rate) / 2; their logit is θ + φ.
    longer = (2.5 - 2 * rate) / 2
    phi = math.log(longer / (1 - longer)) - theta
    assert 1.5 - 2 * longer == pytest.approx(phi, abs=1e-6)
    assert 0.5 < rate < 0.625  # less than the plain rate: the longer replies win more


@settings(max_examples=30, deadline=None)
@given(COMPARED)
def test_it_is_the_optimum_of_the_penalised_likelihood(compared: list[tuple[float, int]]) -> None:
    outcome, difference = arrays(compared)
    spread = difference.std()
    if outcome.mean() in (0.0, 1.0) or spread == 0:
        return
    x = np.tanh(difference / spread)

    def negative_log_likelihood(parameters: np.ndarray) -> float:
        z = parameters[0] + parameters[1] * x
        loss = outcome * np.logaddexp(0, -z) + (1 - outcome) * np.logaddexp(0, z)
        return float(loss.sum() + parameters[1] ** 2 / 2)

    theta = minimize(negative_log_likelihood, np.zeros(2), method="BFGS", options={"gtol": 1e-8}).x[0]
    assert rate_at_equal_length(outcome, x) == pytest.approx(1 / (1 + math.exp(-theta)), abs=1e-4)


@settings(max_examples=30, deadline=None)
@given(COMPARED)
def test_swapping_the_players_gives_the_complement(compared: list[tuple[float, int]]) -> None:
    outcome, difference = arrays(compared)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        forth = length_controlled_win_rate(outcome, difference, 20, 3)
        back = length_controlled_win_rate(1 - outcome, -difference, 20, 3)
    assert back["lc_win_rate"] == pytest.approx(1 - forth["lc_win_rate"], abs=1e-6)
    assert back["lc_win_rate_low95"] == pytest.approx(1 - forth["lc_win_rate_high95"], abs=1e-6)
    assert 0 <= forth["lc_win_rate_low95"] <= forth["lc_win_rate_high95"] <= 1


@pytest.mark.parametrize("difference", [0.0, 12.0])
def test_equal_differences_leave_the_plain_win_rate_and_its_interval(difference: float) -> None:
    scores, baseline = [1.0, 0.0, 2.0, 1.0, 3.0], [0.0, 1.0, 1.0, 1.0, 0.0]
    comparison = compare(scores, baseline, 0.0, bootstrap=500, seed=4, length_difference=np.full(5, difference))
    assert comparison["win_rate"] == 0.7
    assert comparison["lc_win_rate"] == comparison["win_rate"]
    assert comparison["lc_win_rate_low95"] == pytest.approx(comparison["win_rate_low95"])
    assert comparison["lc_win_rate_high95"] == pytest.approx(comparison["win_rate_high95"])


@pytest.mark.parametrize("outcome", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("prompts", [1, 2, 12])
def test_data_without_variation_gives_its_rate_and_no_warning(outcome: float, prompts: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rate = length_controlled_win_rate(np.full(prompts, outcome), np.arange(float(prompts)), 20, 0)
    assert rate["lc_win_rate"] == pytest.approx(outcome)
    bounds = (outcome, outcome) if prompts > 1 else (0.0, 1.0)
    assert (rate["lc_win_rate_low95"], rate["lc_win_rate_high95"]) == pytest.approx(bounds)


def test_length_alone_deciding_leaves_nothing_to_say_for_the_candidate() -> None:
    longer_by = np.array([-30.0, -20.0, -10.0, 10.0, 20.0, 30.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rate = length_controlled_win_rate((longer_by > 0).astype(float), longer_by, 50, 0)
    assert rate["lc_win_rate"] == pytest.approx(0.5)


def test_lengths_are_characters_of_candidate_minus_baseline() -> None:
    candidate, baseline = [Reply("four", True), Reply("", True)], [Reply("to", True), Reply("abc", False)]
    assert length_differences(candidate, baseline).tolist() == [2.0, -3.0]


def test_without_lengths_the_controlled_rate_is_absent() -> None:
    assert not any(name.startswith("lc_") for name in compare([1.0], [0.0], 0.0))
