"""Hand-computed numbers for advantages, losses and their reduction, the examples of docs/algorithms.md included."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError
from unit.ppo.tensors import NAN, close, t

from rlhf_core.config.ppo import AdvantageConfig, KlConfig, PpoConfig
from rlhf_core.ppo.advantages import (
    explained_variance,
    gae,
    masked_whiten,
    monte_carlo_returns,
    normalize_and_clip_advantages,
)
from rlhf_core.ppo.losses import (
    aggregate,
    clip_fraction_mask,
    clipped_surrogate,
    masked_mean,
    penalty_surrogate,
    ratios,
    step_totals,
    value_clip_mask,
    value_loss,
)
from rlhf_core.sampling.token_scoring import entropy


def test_gae_by_hand() -> None:
    rewards, values = t([0.0, 0.0, 1.0]), t([0.5, 0.4, 0.2])
    mask = torch.ones(1, 3, dtype=torch.bool)
    # delta = (-0.1, -0.2, 0.8); with gamma lam = 0.5: A3 = 0.8, A2 = 0.2, A1 = 0.0
    advantages, returns = gae(rewards, values, mask, 1.0, 0.5)
    assert close(advantages, [[0.0, 0.2, 0.8]])
    assert close(returns, [[0.5, 0.6, 1.0]])


def test_gae_extremes() -> None:
    """lambda 1 is Monte Carlo, lambda 0 is TD."""
    rewards, values = t([0.1, 0.2, 1.0]), t([0.5, 0.4, 0.2])
    mask = torch.ones(1, 3, dtype=torch.bool)
    _, returns = gae(rewards, values, mask, 0.9, 1.0)
    assert close(returns, [[0.1 + 0.9 * (0.2 + 0.9), 0.2 + 0.9, 1.0]])
    assert close(monte_carlo_returns(rewards, mask, 0.9), returns)
    advantages, _ = gae(rewards, values, mask, 0.9, 0.0)
    assert close(advantages, [[0.1 + 0.36 - 0.5, 0.2 + 0.18 - 0.4, 0.8]])


def test_whitening_removes_the_mean_and_ignores_padding() -> None:
    """Trap 4: the mean is not added back and padding takes no part; population variance."""
    mask = torch.tensor([[True, True, False], [True, True, True]])
    whitened = masked_whiten(t([1.0, 2.0, NAN], [3.0, 4.0, 5.0]), mask)
    root = math.sqrt(2 + 1e-8)
    assert close(whitened, [[-2 / root, -1 / root, 0], [0, 1 / root, 2 / root]])


def test_normalise_then_clip() -> None:
    mask = torch.ones(1, 2, dtype=torch.bool)
    treated = normalize_and_clip_advantages(t([10.0, 30.0]), mask, AdvantageConfig(normalize=True, clip=0.5))
    assert close(treated, [[-0.5, 0.5]])
    assert close(normalize_and_clip_advantages(t([10.0, -3.0]), mask, AdvantageConfig(clip=4.0)), [[4.0, -3.0]])


def test_explained_variance() -> None:
    mask = torch.tensor([[True, True, True, False]])
    targets = t([1.0, 2.0, 3.0, NAN])
    assert explained_variance(targets, targets, mask) == 1.0
    assert explained_variance(t([2.0, 2.0, 2.0, 0.0]), targets, mask) == 0.0
    assert explained_variance(t([3.0, 2.0, 1.0, 0.0]), targets, mask) == pytest.approx(-3.0)
    assert explained_variance(targets, t([1.0, 1.0, 1.0, 1.0]), mask) == 0.0


@pytest.mark.parametrize(
    ("ratio", "advantage", "clip", "dual", "loss"),
    [
        (1.3, 2.0, 0.2, None, -2.4),  # the worked example of docs/algorithms.md
        (0.5, 2.0, 0.2, None, -1.0),
        (1.3, -2.0, 0.2, None, 2.6),
        (0.5, -2.0, 0.2, None, 1.6),
        (1.3, 2.0, None, None, -2.6),
        (9.0, -1.0, 0.2, None, 9.0),
        (9.0, -1.0, 0.2, 3.0, 3.0),
        (1.1, -1.0, 0.2, 3.0, 1.1),
        (9.0, 1.0, 0.2, 3.0, -1.2),
    ],
)
def test_clipped_surrogate(ratio: float, advantage: float, clip: float | None, dual: float | None, loss: float) -> None:
    assert close(clipped_surrogate(t([ratio]), t([advantage]), clip, dual), [[loss]])


def test_penalty_surrogate() -> None:
    expected = -1.5 * 2 + 0.1 * (1.5 - 1 - math.log(1.5))
    assert close(penalty_surrogate(t([1.5]), t([2.0]), 0.1), [[expected]])


def test_clipped_share_is_where_the_gradient_is_gone() -> None:
    ratio, advantages = t([1.3, 1.3, 0.7, 0.7, 1.0]), t([1.0, -1.0, 1.0, -1.0, 1.0])
    assert clip_fraction_mask(ratio, advantages, 0.2).tolist() == [[True, False, False, True, False]]


def test_ratio_of_padding_is_one_and_safe() -> None:
    new = torch.tensor([[0.0, 1e4]], requires_grad=True)
    ratio = ratios(new, torch.tensor([[0.0, -1e4]]), torch.tensor([[True, False]]))
    ratio.sum().backward()
    assert ratio.tolist() == [[1.0, 1.0]]
    assert new.grad is not None and new.grad.tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize(
    ("value", "old", "target", "clip", "loss"),
    [(1.0, 0.0, 2.0, 0.2, 0.5 * 1.8**2), (1.0, 0.0, 2.0, None, 0.5), (0.1, 0.0, 2.0, 0.2, 0.5 * 1.9**2),
     (-1.0, 0.0, 2.0, 0.2, 0.5 * 9.0)],
)  # fmt: skip
def test_value_loss(value: float, old: float, target: float, clip: float | None, loss: float) -> None:
    assert close(value_loss(t([value]), t([old]), t([target]), clip), [[loss]])


def test_value_clip_mask() -> None:
    hit = value_clip_mask(t([1.0, 0.1, -1.0]), t([0.0, 0.0, 0.0]), t([2.0, 2.0, 2.0]), 0.2)
    assert hit.tolist() == [[True, False, False]]


def test_entropy_of_a_uniform_distribution() -> None:
    assert close(entropy(torch.full((1, 1, 8), -math.log(8), dtype=torch.float64)), [[math.log(8)]])


def test_aggregation_modes() -> None:
    mask = torch.tensor([[True, False, False], [True, True, True]])
    values = t([4.0, NAN, NAN], [1.0, 2.0, 3.0])
    size = step_totals(mask)
    assert float(aggregate(values, mask, size, "token")) == 2.5
    assert float(aggregate(values, mask, size, "sequence")) == 3.0
    assert float(masked_mean(values, mask)) == 2.5


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kl": {"estimator": "k3"}}, "only k1 does"),
        ({"kl": {"placement": "loss"}}, "zero mean"),
        ({"kl": {"coefficient": 0.0, "controller": "adaptive"}}, "stays 0"),
        ({"kl": {"target": 3.0}}, "target steers the adaptive controller"),
        ({"kl": {"horizon": 10}}, "horizon steers the adaptive controller"),
        ({"surrogate": {"kind": "penalty", "dual_clip": 3.0}}, "dual_clip"),
        ({"surrogate": {"clip": None, "dual_clip": 3.0}}, "dual_clip"),
        ({"surrogate": {"penalty": 0.2}}, "kind is clip"),
        ({"surrogate": {"kind": "penalty", "clip": 0.3}}, "clips nothing"),
        ({"surrogate": {"kind": "penalty", "penalty": 0.0}}, "unclipped surrogate"),
        ({"surrogate": {"fixed_reference": True}, "target_kl_early_stop": 0.1}, "end every update"),
        ({"target_kl_early_stop": 0.1, "minibatches": 1}, "never acts"),
        ({"entropy": {"kind": "bonus"}}, "weight 0"),
        ({"entropy": {"target": 1.0}}, "target is set but entropy kind is off"),
        ({"entropy": {"weight": 0.1}}, "weight is set but entropy kind is off"),
        ({"entropy": {"kind": "bonus", "weight": 0.1, "target": 1.0}}, "a bonus has none"),
        ({"entropy": {"kind": "target", "weight": 0.1}}, "target above 0"),
        ({"iterations": 4}, "never reach its peak"),
        ({"critic_mode": "shared", "critic_optimizer": {"lr": 2e-3}}, "policy_optimizer trains the one model"),
        ({"critic_optimizer": None}, "critic of its own needs one"),
        ({"critic_mode": "shared", "policy_init": "base"}, "put on another model's"),
        ({"policy_lora": {"rank": 2}, "policy_init": "base"}, "policy_init must be sft"),
        ({"batch_size": 63}, "multiple"),
        ({"min_new_tokens": 64}, "below"),
        ({"gradient_norm": "joint", "critic_optimizer": {"lr": 1e-3, "max_grad_norm": None}}, "same max_grad_norm"),
        ({"policy_optimizer": {"lr": 1e-3, "warmup": 0.1}}, "twice"),
        ({"importance_sampling_correction": {"cap": 0.5}}, "greater than or equal to 1"),
        ({"importance_sampling_correction": {"mode": "never", "cap": 3.0}}, "mode is never"),
    ],
)
def test_contradictory_switches_are_refused_with_a_reason(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        PpoConfig.model_validate(changes)


def test_the_rollouts_settings_are_what_the_critic_shares() -> None:
    config = PpoConfig(max_new_tokens=33, temperature=0.7, kl=KlConfig(coefficient=0.2))
    assert (config.rollout.max_new_tokens, config.rollout.temperature, config.rollout.kl.coefficient) == (33, 0.7, 0.2)
