"""Figures of a reward model, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rlhf_core.data.schema import Message, Preference
from rlhf_core.training.reward import evaluation
from rlhf_core.training.reward.evaluation import LIMITS, bag_of_words_accuracy, fitted_temperature


def test_accuracy_counts_ties_half() -> None:
    assert evaluation.accuracy(np.array([1.0, -1.0, 0.0, 2.0])) == pytest.approx(2.5 / 4)


def test_calibration_error_by_hand() -> None:
    # Both margins say 0.8; one of the two is right: error 0.3.
    margin = math.log(4)
    assert evaluation.expected_calibration_error(np.array([margin, -margin])) == pytest.approx(0.3)
    # 0.8 said, four of five right: calibrated.
    assert evaluation.expected_calibration_error(np.array([margin] * 4 + [-margin])) == pytest.approx(0.0, abs=1e-12)
    # Certain and right.
    assert evaluation.expected_calibration_error(np.array([50.0])) == pytest.approx(0.0, abs=1e-12)


def test_figures_of_a_split() -> None:
    chosen, rejected = np.array([2.0, 0.0, 1.0]), np.array([0.0, 1.0, 0.0])
    figures = evaluation.evaluate_scores(chosen, rejected, np.array([5, 2, 3]), np.array([3, 4, 3]))
    assert figures["accuracy"] == pytest.approx(2 / 3)
    assert figures["margin_mean"] == pytest.approx(2 / 3)
    assert figures["accuracy_shorter_preferred"] == 0.0
    assert figures["baseline_longer"] == pytest.approx(0.5)  # right, wrong, tie
    assert figures["reward_mean"] == pytest.approx(4 / 6)
    assert all(math.isfinite(value) for value in figures.values())
    longer = evaluation.evaluate_scores(chosen[:1], rejected[:1], np.array([5]), np.array([3]))
    assert "accuracy_shorter_preferred" not in longer


def test_length_balanced_accuracy_by_hand() -> None:
    # 100 pairs: the longer reply is preferred in 80, the model always prefers the longer one.
    longer = np.arange(100) < 80
    chosen_lengths, rejected_lengths = np.where(longer, 30, 20), np.where(longer, 20, 30)
    reward_is_length = chosen_lengths / 10, rejected_lengths / 10
    few = evaluation.evaluate_scores(*reward_is_length, chosen_lengths, rejected_lengths, seed=1)
    assert few["accuracy"] == few["baseline_longer"] == 0.8
    assert few["length_balanced_pairs"] == 40
    assert "accuracy_length_balanced" not in few, "fewer than 50 say nothing"
    twice = [np.concatenate([array, array]) for array in (*reward_is_length, chosen_lengths, rejected_lengths)]
    figures = evaluation.evaluate_scores(*twice, seed=1)
    assert figures["length_balanced_pairs"] == 80
    assert figures["accuracy_length_balanced"] == 0.5
    assert figures["ece_length_balanced"] == pytest.approx(1 / (1 + math.exp(-1)) - 0.5)  # margins are 1 or -1
    # Wilson's lower bound for 40 of 80, with z = 1.96: (p + z²/2n - z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n).
    assert figures["accuracy_length_balanced_low95"] == pytest.approx(0.39297, abs=1e-4)


def test_a_tie_of_rewards_is_no_success_for_the_bound() -> None:
    figures = evaluation.length_balanced_accuracy(np.zeros(60))
    assert figures == {
        "length_balanced_pairs": 60.0,
        "accuracy_length_balanced": 0.5,
        "accuracy_length_balanced_low95": 0.0,
        "ece_length_balanced": 0.0,  # a margin of 0 says one half
    }


def test_categories_too_small_to_say_anything_are_left_out() -> None:
    margins = np.array([1.0] * 8 + [-1.0] * 2 + [1.0])
    assert evaluation.accuracy_by_category(margins, ["a"] * 10 + ["b"]) == {"a": 0.8}


def test_agreement() -> None:
    assert evaluation.agreement(np.array([1.0, -2.0, 3.0]), np.array([0.1, 5.0, 2.0])) == pytest.approx(2 / 3)


def test_bag_of_words_finds_a_word_that_gives_it_away() -> None:
    def pair(i: int) -> Preference:
        good, bad = f"thing {i} thanks", f"thing {i} rubbish"
        return Preference(str(i), [Message("user", "x")], good, bad, None, "c", "s", "g")

    assert bag_of_words_accuracy([pair(i) for i in range(20)], {"test": [pair(99)]}) == {"test": 1.0}


def test_the_temperature_makes_confidence_the_share_that_is_right() -> None:
    # Three of four are right at |margin| 2: sigma(2 / T) = 3 / 4, so that T = 2 / ln 3.
    margins = np.array([2.0, 2.0, 2.0, -2.0])
    temperature = fitted_temperature(margins)
    assert temperature == pytest.approx(2 / math.log(3), rel=1e-3)
    assert evaluation.expected_calibration_error(margins / temperature) == pytest.approx(0.0, abs=1e-3)
    assert fitted_temperature(10 * margins) == pytest.approx(10 * temperature, rel=1e-3)


def test_the_temperature_is_bounded_where_margins_say_nothing_or_everything() -> None:
    assert fitted_temperature(np.array([1.0, -1.0])) == pytest.approx(LIMITS[1], rel=1e-2)
    assert fitted_temperature(np.array([1.0, 2.0])) == pytest.approx(LIMITS[0], rel=1e-1)


def test_calibration_is_measured_after_scaling_too() -> None:
    chosen, rejected = np.array([2.0, 2.0, 2.0, 0.0]), np.array([0.0, 0.0, 0.0, 2.0])
    figures = evaluation.evaluate_scores(chosen, rejected, np.arange(4) + 2, np.arange(4) + 1, 0, 2 / math.log(3))
    # sigma(2) is 0.881, of which 3 in 4 are right.
    assert figures["ece"] == pytest.approx(1 / (1 + math.exp(-2)) - 0.75)
    assert figures["ece_temperature_scaled"] == pytest.approx(0.0, abs=1e-12)
    assert "ece_length_balanced_temperature_scaled" not in figures
