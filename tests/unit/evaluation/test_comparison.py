"""Win rates and their intervals, plain and at equal lengths: by hand, against an optimiser, and
their symmetries.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from rlhf_core.errors import DataError
from rlhf_core.evaluation.comparisons.comparison import (
    compare,
    compare_outcomes,
    length_controlled_win_rate,
    length_differences,
    rates_at_equal_length,
    tie_margin_of,
)
from rlhf_core.evaluation.judges.gold import GOLD_TIE_MARGIN, GoldJudge
from rlhf_core.evaluation.replies import Reply
from rlhf_core.evaluation.statistics import bootstrap_bounds

from .conftest import LengthJudge

SCORES = st.lists(st.floats(-5, 5), min_size=1, max_size=30)


def width(comparison: Any) -> float:
    """Of the interval of the win rate."""
    return float(comparison["win_rate_high95"] - comparison["win_rate_low95"])


def test_by_hand_with_an_absolute_margin() -> None:
    comparison = compare([1.0, 0.5, 0.0, 0.2], [0.0, 0.45, 1.0, 0.1], tie_margin=0.06)
    assert (comparison["win"], comparison["tie"], comparison["lose"]) == (0.5, 0.25, 0.25)
    assert comparison["win_rate"] == 0.625
    assert comparison["mean_difference"] == pytest.approx((1.0 + 0.05 - 1.0 + 0.1) / 4)
    assert comparison["prompts"] == 4


def test_a_difference_of_exactly_the_margin_is_a_tie() -> None:
    assert compare([1.5], [1.0], tie_margin=0.5)["tie"] == 1.0
    assert compare([1.5], [1.0], tie_margin=0.49)["win"] == 1.0


def test_relative_margin_is_a_share_of_the_spread_of_the_baseline() -> None:
    # Baseline scores 3, 1, 1, 1: the standard deviation is sqrt(3)/2 = .866, and a margin of 1.2 of
    # it 1.039.
    assert tie_margin_of(LengthJudge(), 1.2, [3.0, 1.0, 1.0, 1.0]) == pytest.approx(
        1.2 * math.sqrt(3) / 2
    )


def test_a_judge_with_a_unit_has_a_margin_of_its_own() -> None:
    assert tie_margin_of(GoldJudge(), 1.2, [3.0, 1.0]) == GOLD_TIE_MARGIN


def test_interval_of_a_coin_matches_the_normal_approximation() -> None:
    coin = compare(
        [1.0] * 200 + [0.0] * 200, [0.0] * 200 + [1.0] * 200, 0.0, bootstrap=4000, seed=3
    )
    assert coin["win_rate"] == 0.5
    assert coin["win_rate_low95"] == pytest.approx(0.5 - 1.96 * 0.025, abs=0.006)
    assert coin["win_rate_high95"] == pytest.approx(0.5 + 1.96 * 0.025, abs=0.006)


def test_the_seed_decides_the_interval_and_nothing_else_does() -> None:
    scores = [0.1 * i for i in range(40)], [0.1 * (i % 7) for i in range(40)]
    assert compare(*scores, 0.1, seed=5) == compare(*scores, 0.1, seed=5)
    assert compare(*scores, 0.1, seed=5)["win_rate"] == compare(*scores, 0.1, seed=6)["win_rate"]


@settings(max_examples=50, deadline=None)
@given(SCORES)
def test_sides_swapped_mirror_each_other(scores: list[float]) -> None:
    other = scores[::-1]
    forth, back = (
        compare(scores, other, 0.1, bootstrap=20),
        compare(other, scores, 0.1, bootstrap=20),
    )
    assert forth["win"] == back["lose"] and forth["tie"] == back["tie"]
    assert forth["win_rate"] + back["win_rate"] == pytest.approx(1.0)
    assert forth["win"] + forth["tie"] + forth["lose"] == pytest.approx(1.0)
    assert forth["win_rate_low95"] <= forth["win_rate_high95"]


def test_constant_values_have_an_interval_of_width_zero_and_one_question_has_none() -> None:
    low, high = bootstrap_bounds(np.full((2, 10), 0.3), 50, seed=0)
    assert low == pytest.approx([0.3, 0.3]) and high == pytest.approx([0.3, 0.3])
    low, high = bootstrap_bounds(
        np.full((2, 10), 0.3), 50, seed=0, clusters=np.zeros(10, dtype=int)
    )
    assert np.isneginf(low).all() and np.isposinf(high).all()
    alone = compare([1.0, 2.0], [0.0, 0.0], 0.1, clusters=[7, 7])
    assert (alone["win_rate_low95"], alone["win_rate_high95"], alone["clusters"]) == (0.0, 1.0, 1)
    assert "mean_difference_low95" not in alone


def test_questions_and_not_rows_are_resampled() -> None:
    rng = np.random.default_rng(1)
    difference = rng.normal(0.1, 1.0, size=40)
    once = compare(difference, np.zeros(40), 0.0, seed=3, length_difference=difference)
    rows = np.repeat(difference, 6)
    clustered = compare(rows, np.zeros(240), 0.0, 2000, 3, rows, np.repeat(np.arange(40), 6))
    for bound in ("win_rate_low95", "win_rate_high95", "mean_difference_low95"):
        assert clustered[bound] == pytest.approx(once[bound], abs=0.02)
    assert (clustered["prompts"], clustered["clusters"]) == (240, 40)
    decided = clustered["clusters_won"], clustered["clusters_tied"], clustered["clusters_lost"]
    assert decided == (int((difference > 0).sum()), 0, int((difference < 0).sum()))
    assert width(compare(rows, np.zeros(240), 0.0, seed=3)) < 0.6 * width(clustered)


@pytest.mark.parametrize(
    ("first", "second", "word"),
    [
        ([], [], "at least one"),
        ([1.0], [1.0, 2.0], "one score per prompt"),
        ([math.nan], [0.0], "not finite"),
    ],
)
def test_bad_input_is_refused_in_words(first: list[float], second: list[float], word: str) -> None:
    with pytest.raises(DataError, match=word):
        compare(first, second, 0.05)


def test_several_replies_to_a_prompt_count_by_prompt() -> None:
    # Pairs won: prompt 1 has 2 of 2, prompt 2 has 1 of 2, prompt 3 has none and a tie.
    comparison = compare(
        [[1.0, 1.0], [1.0, 0.0], [0.0, 0.5]],
        [[0.0, 0.0], [0.0, 1.0], [1.0, 0.5]],
        0.1,
        bootstrap=20,
    )
    assert (comparison["win"], comparison["tie"], comparison["lose"]) == pytest.approx(
        (1 / 3, 1 / 3, 1 / 3)
    )
    assert comparison["win_rate"] == pytest.approx((1.0 + 0.5 + 0.25) / 3)
    assert comparison["mean_difference"] == pytest.approx((1.0 + 0.0 - 0.5) / 3)
    assert comparison["prompts"] == 3


def test_bounds_resample_prompts_and_not_replies() -> None:
    scores, other = [1.0, 0.0, 1.0, 1.0, 0.0], [0.0, 1.0, 0.5, 0.2, 0.3]
    once = compare(
        scores, other, 0.1, seed=3, length_difference=np.array([3.0, -1.0, 2.0, 0.0, 5.0])
    )
    copies = [
        np.repeat(np.reshape(column, (-1, 1)), 50, axis=1)
        for column in (scores, other, [3, -1, 2, 0, 5])
    ]
    fifty = compare(copies[0], copies[1], 0.1, seed=3, length_difference=copies[2])
    for bound in ("low95", "high95"):
        assert fifty[f"win_rate_{bound}"] == pytest.approx(once[f"win_rate_{bound}"])
        assert fifty[f"mean_difference_{bound}"] == pytest.approx(once[f"mean_difference_{bound}"])
    assert fifty["lc_win_rate_high95"] - fifty["lc_win_rate_low95"] > 0.3, (
        "fifty copies of a reply are no evidence"
    )


def test_further_replies_narrow_the_interval() -> None:
    rng = np.random.default_rng(0)
    difference = rng.normal(0.2, 1.0, size=(100, 8))
    one = compare(difference[:, :1], np.zeros((100, 1)), 0.0, seed=1)
    eight = compare(difference, np.zeros((100, 8)), 0.0, seed=1)
    assert width(eight) < 0.5 * width(one)


def test_outcomes_without_scores_have_the_win_rates_of_scores_with_them() -> None:
    scores, baseline = [1.0, 0.5, 0.0, 0.2, 0.9, 0.1], [0.0, 0.5, 1.0, 0.1, 0.1, 0.4]
    longer_by = np.array([3.0, -2.0, 5.0, 1.0, 8.0, -4.0])
    scored = compare(scores, baseline, 0.0, 200, 3, longer_by)
    judged = compare_outcomes([1.0, 0.5, 0.0, 1.0, 1.0, 0.0], 200, 3, longer_by)
    assert judged.keys() == {name for name in scored if "difference" not in name} - {"tie_margin"}
    assert judged == pytest.approx({name: scored[name] for name in judged})


def test_without_outcomes_nothing_is_compared() -> None:
    with pytest.raises(DataError, match="at least one prompt that was judged"):
        compare_outcomes([])


def rate_at_equal_length(outcome: np.ndarray, feature: np.ndarray) -> float:
    return float(rates_at_equal_length(outcome, feature, np.ones((1, len(outcome))))[0])


COMPARED = st.lists(
    st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(-400, 400)), min_size=1, max_size=40
)


def arrays(compared: list[tuple[float, int]]) -> tuple[np.ndarray, np.ndarray]:
    outcome, difference = zip(*compared, strict=True)
    return np.array(outcome), np.array(difference, dtype=np.float64)


def test_equal_lengths_by_hand() -> None:
    # Half of the replies are longer by 50 and win 3 of 4, half are as much shorter and win 1 of 4.
    # By symmetry θ is 0: all of the advantage is length, on either side.
    outcome = np.array([1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0])
    longer_by = np.array([50.0] * 4 + [-50.0] * 4)
    assert length_controlled_win_rate(outcome, longer_by, 50, 0)["lc_win_rate"] == pytest.approx(
        0.5
    )
    # Of 1,000 pairs 900 are the longer ones: the plain rate is .70, the controlled one still half.
    outcome = np.repeat([1.0, 0.0, 1.0, 0.0], [675, 225, 25, 75])
    longer_by = np.repeat([50.0, 50.0, -50.0, -50.0], [675, 225, 25, 75])
    assert outcome.mean() == pytest.approx(0.70)
    assert length_controlled_win_rate(outcome, longer_by, 2, 0)["lc_win_rate"] == pytest.approx(
        0.5, abs=0.01
    )


def test_ties_are_half_wins_by_the_first_order_conditions() -> None:
    # Two pairs at feature 0 and two at 1. With θ the intercept and φ the penalised slope the
    # gradient is zero where Σ(o - p) = 0 and Σ x(o - p) = φ.
    outcome, feature = np.array([1.0, 0.5, 1.0, 0.5]), np.array([0.0, 0.0, 1.0, 1.0])
    assert rate_at_equal_length(outcome, feature) == pytest.approx(
        0.75
    )  # both groups win 3 of 4: φ = 0
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

    theta = minimize(negative_log_likelihood, np.zeros(2), method="BFGS", options={"gtol": 1e-8}).x[
        0
    ]
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


def test_equal_lengths_leave_the_plain_win_rate_and_its_interval() -> None:
    scores, baseline = [1.0, 0.0, 2.0, 1.0, 3.0], [0.0, 1.0, 1.0, 1.0, 0.0]
    comparison = compare(
        scores, baseline, 0.0, bootstrap=500, seed=4, length_difference=np.zeros(5)
    )
    assert comparison["win_rate"] == 0.7
    assert comparison["lc_win_rate"] == comparison["win_rate"]
    assert comparison["lc_win_rate_low95"] == pytest.approx(comparison["win_rate_low95"])
    assert comparison["lc_win_rate_high95"] == pytest.approx(comparison["win_rate_high95"])


@pytest.mark.parametrize("outcome", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("prompts", [1, 2, 12])
def test_data_without_variation_gives_its_rate_and_no_warning(outcome: float, prompts: int) -> None:
    lengths = np.arange(float(prompts)) - (prompts - 1) / 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rate = length_controlled_win_rate(np.full(prompts, outcome), lengths, 20, 0)
    assert rate["lc_win_rate"] == pytest.approx(outcome)
    # Score bounds of 12 replies by hand, z² = 3.8415: Wilson's for one outcome, ½ ± ½ · z² / (n +
    # z²) for ties. Of two pairs half of the resamples lack one sign, and so show nothing.
    wilson = 12 / 15.8415
    twelve = {
        0.0: (0.0, 1 - wilson),
        0.5: (0.5 - 0.5 * (1 - wilson), 0.5 + 0.5 * (1 - wilson)),
        1.0: (wilson, 1.0),
    }
    bounds = twelve[outcome] if prompts == 12 else (0.0, 1.0)
    assert (rate["lc_win_rate_low95"], rate["lc_win_rate_high95"]) == pytest.approx(
        bounds, abs=1e-4
    )


def test_length_alone_deciding_leaves_nothing_to_say_for_the_candidate() -> None:
    longer_by = np.array([-30.0, -20.0, -10.0, 10.0, 20.0, 30.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rate = length_controlled_win_rate((longer_by > 0).astype(float), longer_by, 50, 0)
    assert rate["lc_win_rate"] == pytest.approx(0.5)


def test_lengths_are_characters_of_candidate_minus_baseline() -> None:
    candidate, baseline = (
        [Reply("four", True), Reply("", True)],
        [Reply("to", True), Reply("abc", False)],
    )
    assert length_differences(candidate, baseline).tolist() == [2.0, -3.0]


def test_without_lengths_the_controlled_rate_is_absent() -> None:
    assert not any(name.startswith("lc_") for name in compare([1.0], [0.0], 0.0))
