"""What is fitted before a reward model is trained: the length expert, and the linear probe on frozen features."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import expit
from sklearn.linear_model import LogisticRegression

from rlhf_core.config.reward import RewardConfig
from rlhf_core.data.pairs import TokenisedPair
from rlhf_core.models.causal_lm import load_policy
from rlhf_core.models.heads import ScalarModel
from rlhf_core.training.reward.first_fits import (
    LengthExpert,
    LengthExperts,
    fit_linear_probe,
    logistic_weights,
    pooled_features,
)
from rlhf_core.training.reward.trainer import score_pairs

DRAW = np.random.default_rng(3)


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


def test_one_weight_by_hand() -> None:
    # Three of four equal differences of 1 are preferred: with no penalty the odds are 3, so the weight is ln 3.
    differences = np.array([[1.0], [1.0], [1.0], [-1.0]])
    assert logistic_weights(differences, np.zeros(4), 1e-9)[0] == pytest.approx(math.log(3), abs=1e-4)
    # Offsets that explain these odds leave nothing to the weight.
    explained = math.log(3) * differences[:, 0]
    assert logistic_weights(differences, explained, 1e-9)[0] == pytest.approx(0, abs=1e-4)


def test_weights_are_those_of_scikit_learn() -> None:
    differences = DRAW.normal(size=(60, 5))
    both_orders, preferred = np.concatenate([differences, -differences]), np.repeat([1, 0], 60)
    # It penalises |w|^2 / 2 against C times the sum of both orders' losses.
    peer = LogisticRegression(fit_intercept=False, C=1 / (0.3 * 120), tol=1e-8).fit(both_orders, preferred)
    assert logistic_weights(differences, np.zeros(60), 0.3) == pytest.approx(peer.coef_[0], abs=1e-4)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_margins_are_those_of_the_fitted_features(workspace: Path, pooling: str) -> None:
    lm, _ = load_policy(workspace / "models/sft")
    model = ScalarModel.from_causal_lm(lm, 1, layers=1, pooling=pooling)  # type: ignore[arg-type]
    replies = [[int(token) for token in DRAW.integers(8, 40, size)] for size in (3, 9, 4, 6, 5, 7)]
    pairs = [TokenisedPair(0, [9, 10], replies[a], replies[b]) for a, b in ((0, 1), (2, 3), (4, 5), (0, 5), (2, 1))]
    offsets = np.linspace(-1, 1, 5)
    fit_linear_probe(model, pairs, offsets, 0.5, 0, "reward")
    chosen, rejected = pooled_features(model, pairs, 0, "reward")
    scale = np.sqrt(((chosen - rejected) ** 2).mean(axis=0)) + 1e-6
    expected = (chosen - rejected) / scale @ logistic_weights((chosen - rejected) / scale, offsets, 0.5)
    assert score_pairs(model, pairs, 0).margins == pytest.approx(expected, abs=1e-4)
    ids = torch.tensor([[9, 10, *replies[0]]])
    states = model.hidden(ids, torch.ones_like(ids))[0].detach()
    by_hand = states[-1] if pooling == "last" else states[2:].mean(dim=0)
    assert chosen[0] == pytest.approx(by_hand.double().numpy(), abs=1e-5)


def test_a_reward_model_that_nothing_would_train_is_refused() -> None:
    with pytest.raises(ValueError, match="steps is 0 and linear_probe is not set"):
        RewardConfig(steps=0)
    assert RewardConfig(steps=0, linear_probe=1.0).steps == 0
