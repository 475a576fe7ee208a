"""The length expert: what lengths alone say of a preference, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import expit

from rlhf_core.training.reward.first_fits import (
    LengthExpert,
    LengthExperts,
)


def test_log_odds_by_hand_change_sign_with_the_order() -> None:
    expert = LengthExpert(scale=10.0, weights=np.array([2.0, 0.5]))
    first, second = np.array([40]), np.array([20])
    # 2 ln(40 / 20) + 0.5 tanh(20 / 10)
    assert expert.log_odds(first, second)[0] == pytest.approx(2 * math.log(2) + 0.5 * math.tanh(2))
    assert expert.log_odds(second, first)[0] == pytest.approx(-expert.log_odds(first, second)[0])
    assert expert.log_odds(first, first)[0] == 0


def test_the_expert_learns_how_often_the_longer_reply_is_preferred() -> None:
    # The longer of 60 and 30 tokens is preferred in three of four pairs: its log-odds are ln 3.
    chosen, rejected = np.array([60, 60, 60, 30] * 500), np.array([30, 30, 30, 60] * 500)
    expert = LengthExpert.fitted(chosen, rejected)
    assert expit(expert.log_odds(np.array([60]), np.array([30])))[0] == pytest.approx(0.75, abs=0.01)


def test_lengths_that_say_nothing_give_no_odds() -> None:
    lengths = np.array([10, 20, 30, 40])
    chosen, rejected = np.concatenate([lengths, lengths[::-1]]), np.concatenate([lengths[::-1], lengths])
    assert LengthExpert.fitted(chosen, rejected).log_odds(np.array([50]), np.array([5]))[0] == pytest.approx(
        0, abs=1e-6
    )


def test_a_category_has_an_expert_of_its_own() -> None:
    # Of general pairs three in four prefer the longer reply, of harmless ones three in four the shorter one.
    chosen, rejected = np.array([60, 60, 60, 30] * 500), np.array([30, 30, 30, 60] * 500)
    categories = ["general"] * 2000 + ["harmless"] * 2000
    lengths = np.concatenate([chosen, rejected]), np.concatenate([rejected, chosen])
    apart = LengthExperts.fitted(*lengths, categories, {"harmless": 0.2})
    one_each = np.array([60, 60]), np.array([30, 30])
    odds = expit(apart.log_odds(*one_each, ["general", "harmless"]))
    assert odds == pytest.approx([0.75, 0.25], abs=0.01)
    together = LengthExperts.fitted(*lengths, categories, {})
    assert expit(together.log_odds(*one_each, ["general", "harmless"])) == pytest.approx([0.5, 0.5], abs=0.01)
