"""Hand-computed numbers for advantages, losses, KL and its controllers, moments and rewards; the
examples of docs/algorithms.md included."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from unit.ppo.tensors import NAN, close, t

from rlhf_core.config.loading import check_params
from rlhf_core.config.ppo import AdvantageConfig, KlConfig, PpoConfig, RewardShapingConfig
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.ppo import advantages as estimators
from rlhf_core.ppo import losses
from rlhf_core.ppo.kl import KlController, kl_estimate, kl_pull
from rlhf_core.ppo.rewards import (
    RunningMeanStd,
    apply_penalties,
    normalize_and_clip_rewards,
    token_rewards,
)
from rlhf_core.sampling.token_scoring import entropy, full_kl


def test_gae_by_hand() -> None:
    rewards, values = t([0.0, 0.0, 1.0]), t([0.5, 0.4, 0.2])
    mask = torch.ones(1, 3, dtype=torch.bool)
    # delta = (-0.1, -0.2, 0.8); with gamma lam = 0.5: A3 = 0.8, A2 = 0.2, A1 = 0.0
    advantages, returns = estimators.gae(rewards, values, mask, 1.0, 0.5)
    assert close(advantages, [[0.0, 0.2, 0.8]])
    assert close(returns, [[0.5, 0.6, 1.0]])


def test_gae_extremes() -> None:
    """lambda 1 is Monte Carlo, lambda 0 is TD."""
    rewards, values = t([0.1, 0.2, 1.0]), t([0.5, 0.4, 0.2])
    mask = torch.ones(1, 3, dtype=torch.bool)
    _, returns = estimators.gae(rewards, values, mask, 0.9, 1.0)
    assert close(returns, [[0.1 + 0.9 * (0.2 + 0.9), 0.2 + 0.9, 1.0]])
    assert close(estimators.monte_carlo_returns(rewards, mask, 0.9), returns)
    advantages, _ = estimators.gae(rewards, values, mask, 0.9, 0.0)
    assert close(advantages, [[0.1 + 0.36 - 0.5, 0.2 + 0.18 - 0.4, 0.8]])


def test_whitening_removes_the_mean_and_ignores_padding() -> None:
    """Trap 4: the mean is not added back and padding takes no part; population variance."""
    mask = torch.tensor([[True, True, False], [True, True, True]])
    whitened = estimators.masked_whiten(t([1.0, 2.0, NAN], [3.0, 4.0, 5.0]), mask)
    root = math.sqrt(2 + 1e-8)
    assert close(whitened, [[-2 / root, -1 / root, 0], [0, 1 / root, 2 / root]])


def test_normalise_then_clip() -> None:
    mask = torch.ones(1, 2, dtype=torch.bool)
    treated = estimators.normalize_and_clip_advantages(
        t([10.0, 30.0]), mask, AdvantageConfig(normalize=True, clip=0.5)
    )
    assert close(treated, [[-0.5, 0.5]])
    assert close(
        estimators.normalize_and_clip_advantages(t([10.0, -3.0]), mask, AdvantageConfig(clip=4.0)),
        [[4.0, -3.0]],
    )


def test_explained_variance() -> None:
    mask = torch.tensor([[True, True, True, False]])
    targets = t([1.0, 2.0, 3.0, NAN])
    assert estimators.explained_variance(targets, targets, mask) == 1.0
    assert estimators.explained_variance(t([2.0, 2.0, 2.0, 0.0]), targets, mask) == 0.0
    assert estimators.explained_variance(t([3.0, 2.0, 1.0, 0.0]), targets, mask) == pytest.approx(
        -3.0
    )
    assert estimators.explained_variance(targets, t([1.0, 1.0, 1.0, 1.0]), mask) == 0.0


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
def test_clipped_surrogate(
    ratio: float, advantage: float, clip: float | None, dual: float | None, loss: float
) -> None:
    assert close(losses.clipped_surrogate(t([ratio]), t([advantage]), clip, dual), [[loss]])


def test_penalty_surrogate() -> None:
    expected = -1.5 * 2 + 0.1 * (1.5 - 1 - math.log(1.5))
    assert close(losses.penalty_surrogate(t([1.5]), t([2.0]), 0.1), [[expected]])


def test_clipped_share_is_where_the_gradient_is_gone() -> None:
    ratio, advantages = t([1.3, 1.3, 0.7, 0.7, 1.0]), t([1.0, -1.0, 1.0, -1.0, 1.0])
    assert losses.clip_fraction_mask(ratio, advantages, 0.2).tolist() == [
        [True, False, False, True, False]
    ]


def test_the_upper_clip_may_be_the_larger_one() -> None:
    ratio, advantages = t([1.25, 1.5, 0.7, 1.5]), t([2.0, 2.0, -1.0, -1.0])
    found = losses.clipped_surrogate(ratio, advantages, 0.2, clip_high=0.28)
    assert close(found, [[-2.5, -2.56, 0.8, 1.5]])
    assert losses.clip_fraction_mask(ratio, advantages, 0.2, 0.28).tolist() == [
        [False, True, True, False]
    ]
    plain = losses.clipped_surrogate(ratio, advantages, 0.2)
    assert torch.equal(losses.clipped_surrogate(ratio, advantages, 0.2, clip_high=0.2), plain)


def test_a_reply_has_one_ratio_the_geometric_mean_of_its_tokens() -> None:
    new = torch.tensor(
        [[math.log(0.9), math.log(0.4), NAN], [0.0, 0.0, 0.0]],
        dtype=torch.float64,
        requires_grad=True,
    )
    old = torch.tensor([[math.log(0.5), math.log(0.8), NAN], [0.0, 0.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    ratio = losses.sequence_ratios(new, old, mask)
    # sqrt(0.9 / 0.5 * 0.4 / 0.8)
    assert close(ratio, [[math.sqrt(0.9), math.sqrt(0.9), 1.0], [1.0, 1.0, 1.0]])
    terms = losses.clipped_surrogate(ratio, t([2.0, 2.0, 0.0], [1.0, 0.0, 0.0]), 0.2)
    losses.aggregate(terms, mask, losses.step_totals(mask), "sequence").backward()
    # Of a reply of two tokens each has the gradient -s A / 2, and two replies are averaged.
    share = -math.sqrt(0.9) * 2.0 / 2 / 2
    assert new.grad is not None and close(new.grad, [[share, share, 0.0], [-0.5, 0.0, 0.0]])


@pytest.mark.parametrize(
    "surrogate",
    [
        {"clip_high": 0.1},
        {"clip": None, "clip_high": 0.3},
        {"ratio": "sequence"},
        {"ratio": "sequence", "aggregation": "sequence", "kind": "penalty", "clip": None},
    ],
)
def test_switches_of_the_surrogate_that_contradict_each_other(surrogate: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="kind clip"):
        PpoConfig.model_validate({"surrogate": surrogate})


def test_ratio_of_padding_is_one_and_safe() -> None:
    new = torch.tensor([[0.0, 1e4]], requires_grad=True)
    ratio = losses.ratios(new, torch.tensor([[0.0, -1e4]]), torch.tensor([[True, False]]))
    ratio.sum().backward()
    assert ratio.tolist() == [[1.0, 1.0]]
    assert new.grad is not None and new.grad.tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize(
    ("value", "old", "target", "clip", "loss"),
    [(1.0, 0.0, 2.0, 0.2, 0.5 * 1.8**2), (1.0, 0.0, 2.0, None, 0.5), (0.1, 0.0, 2.0, 0.2, 0.5 * 1.9**2),
     (-1.0, 0.0, 2.0, 0.2, 0.5 * 9.0)],
)  # fmt: skip
def test_value_loss(
    value: float, old: float, target: float, clip: float | None, loss: float
) -> None:
    assert close(losses.value_loss(t([value]), t([old]), t([target]), clip), [[loss]])


def test_value_clip_mask() -> None:
    hit = losses.value_clip_mask(t([1.0, 0.1, -1.0]), t([0.0, 0.0, 0.0]), t([2.0, 2.0, 2.0]), 0.2)
    assert hit.tolist() == [[True, False, False]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("spread", "moved"), [(0.3, 0.19), (1.0, 0.19), (30.0, 0.15), (0.05, 0.05)]
)
def test_rounding_is_no_value_clip(dtype: torch.dtype, spread: float, moved: float) -> None:
    """A value that moved less far than the clip is not clipped, whatever the digits of the two
    branches.
    """
    generator = torch.Generator().manual_seed(0)
    old = (spread * torch.randn(20_000, generator=generator, dtype=torch.float64)).to(dtype)
    new = (old + moved * (2 * torch.rand(20_000, generator=generator, dtype=torch.float64) - 1)).to(
        dtype
    )
    returns = torch.randn(20_000, generator=generator, dtype=torch.float64).to(dtype)
    near = (new.double() - old.double()).abs() < 0.2
    hit = losses.value_clip_mask(new, old, returns, 0.2)
    assert not bool((hit & near).any()) and (dtype is torch.bfloat16 or bool(near.all()))


def test_entropy_of_a_uniform_distribution() -> None:
    assert close(entropy(torch.full((1, 1, 8), -math.log(8), dtype=torch.float64)), [[math.log(8)]])


def test_aggregation_modes() -> None:
    mask = torch.tensor([[True, False, False], [True, True, True]])
    values = t([4.0, NAN, NAN], [1.0, 2.0, 3.0])
    size = losses.step_totals(mask)
    assert float(losses.aggregate(values, mask, size, "token")) == 2.5
    assert float(losses.aggregate(values, mask, size, "sequence")) == 3.0
    assert float(losses.masked_mean(values, mask)) == 2.5


RATIO: dict[str, object] = {"importance_sampling_correction": {"mode": "ratio"}}


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
        ({"iterations": 4, "warmup_iterations": 5}, "never reach its peak"),
        (
            {"critic_mode": "shared", "critic_optimizer": {"lr": 2e-3}},
            "policy_optimizer trains the one model",
        ),
        ({"critic_optimizer": None}, "critic of its own needs one"),
        ({"critic_mode": "shared", "policy_init": "base"}, "put on another model's"),
        ({"policy_lora": {"rank": 2}, "policy_init": "base"}, "policy_init must be sft"),
        ({"batch_size": 63}, "multiple"),
        ({"min_new_tokens": 64}, "below"),
        (
            {"gradient_norm": "joint", "critic_optimizer": {"lr": 1e-3, "max_grad_norm": None}},
            "same max_grad_norm",
        ),
        ({"policy_optimizer": {"lr": 1e-3, "warmup": 0.1}, "warmup_iterations": 5}, "twice"),
        ({"importance_sampling_correction": {"cap": 0.5}}, "greater than or equal to 1"),
        ({"importance_sampling_correction": {"mode": "never", "cap": 3.0}}, "mode is never"),
        ({"importance_sampling_correction": {"mode": "ratio", "cap": 3.0}}, "mode is ratio"),
        (
            RATIO | {"critic_mode": "shared", "critic_optimizer": None},
            "gives the values, too: use critic_mode sep",
        ),
        (RATIO | {"kl": {"measure_full": True}}, "exact KL of a rollout needs it"),
        (
            RATIO | {"kl": {"placement": "loss", "estimator": "full"}},
            "kl.estimator to another than full",
        ),
        (
            RATIO | {"surrogate": {"fixed_reference": True}},
            "but surrogate.fixed_reference to the reference",
        ),
    ],
)
def test_contradictory_switches_are_refused_with_a_reason(
    changes: dict[str, object], reason: str
) -> None:
    with pytest.raises(ValidationError, match=reason):
        PpoConfig.model_validate(changes)


def test_the_rollouts_settings_are_what_the_critic_shares() -> None:
    config = PpoConfig(max_new_tokens=33, temperature=0.7, kl=KlConfig(coefficient=0.2))
    assert (
        config.rollout.max_new_tokens,
        config.rollout.temperature,
        config.rollout.kl.coefficient,
    ) == (33, 0.7, 0.2)


def test_kl_estimators_by_hand() -> None:
    new, ref = t(-1.2), t(-1.6)
    assert close(kl_estimate(new, ref, "k1"), [0.4])
    assert close(kl_estimate(new, ref, "k2"), [0.08])
    assert close(kl_estimate(new, ref, "k3"), [math.exp(-0.4) - 1 + 0.4])


def test_course_example_of_a_token_reward() -> None:
    """log pi -1.2, log pi_ref -1.6, beta 0.05: the token's reward is -0.02."""
    kl = kl_estimate(t([-1.2, -2.0]), t([-1.6, -2.0]), "k1")
    rewards = token_rewards(t(1.0), torch.tensor([[True, True]]), kl, 0.05)
    assert close(rewards, [[-0.02, 1.0]])


def test_what_a_nat_of_drift_costs() -> None:
    # Mean 2, squared deviations 1, 1, 1, 1: SD 1. Twice the spread halves the pull.
    assert kl_pull(t(1.0, 3.0, 1.0, 3.0), 0.05) == pytest.approx(0.05)
    assert kl_pull(t(0.0, 4.0, 0.0, 4.0), 0.05) == pytest.approx(0.025)
    assert kl_pull(t(0.0, 4.0), 0.0) == 0.0
    assert math.isnan(kl_pull(t(1.0, 1.0), 0.05))


def test_full_kl_by_hand() -> None:
    p, q = t([[0.5, 0.5]]).log(), t([[0.25, 0.75]]).log()
    assert close(full_kl(p, q), [[0.5 * math.log(2) + 0.5 * math.log(2 / 3)]])


def test_sampled_estimators_average_to_the_exact_kl() -> None:
    p = torch.log_softmax(t([0.3, -1.0, 0.9]), 1)[0]
    q = torch.log_softmax(t([-0.2, 0.4, 0.1]), 1)[0]
    exact = full_kl(p, q)
    for estimator in ("k1", "k3"):
        assert close((p.exp() * kl_estimate(p, q, estimator)).sum(), exact)


@pytest.mark.parametrize(("estimator", "cosine"), [("k2", 1.0), ("full", 1.0), ("k1", 0.0)])
def test_gradient_of_the_kl_in_the_loss(estimator: str, cosine: float) -> None:
    """In the loss k2 and full give the gradient of reverse KL; k1 gives none on average, so it is
    refused there.
    """
    logits = t([0.3, -1.0, 0.9])[0].requires_grad_()
    q = torch.log_softmax(t([-0.2, 0.4, 0.1])[0], 0)
    p = torch.log_softmax(logits, 0)
    true = torch.autograd.grad(full_kl(p, q), logits, retain_graph=True)[0]
    loss = (
        full_kl(p, q)
        if estimator == "full"
        else (p.detach().exp() * kl_estimate(p, q, estimator)).sum()
    )
    got = torch.autograd.grad(loss, logits)[0]
    assert close(got, true * cosine, 1e-7)


def test_adaptive_controller() -> None:
    controller = KlController(
        KlConfig(coefficient=0.1, controller="adaptive", target=6.0, horizon=1000)
    )
    controller.update(6.6, 100)  # error 0.1
    assert controller.value == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    controller.update(60.0, 100)  # clipped to 0.2
    assert controller.value == pytest.approx(0.1 * 1.01 * 1.02)
    before = controller.value
    for kl in (NAN, math.inf, -math.inf):
        controller.update(kl, 100)
        assert controller.value == before


def test_adaptive_controller_never_turns_negative() -> None:
    """Without a floor a rollout of 64 at horizon 10 would multiply the coefficient by 1 - 0.2 * 64
    / 10 = -0.28.
    """
    controller = KlController(KlConfig(coefficient=0.05, controller="adaptive", horizon=10))
    controller.update(0.0, 64)
    assert controller.value == pytest.approx(0.005)
    controller.update(0.0, 40)  # 1 - 0.2 * 4 = 0.2, above the floor
    assert controller.value == pytest.approx(0.001)


def test_a_horizon_at_which_one_rollout_would_turn_the_coefficient_is_refused_by_its_path() -> None:
    for horizon in (10, 12):
        with pytest.raises(
            ConfigError, match=rf"'ppo'.*kl\.horizon {horizon} is too short for batch_size 64.*abov"
        ):
            check_params(
                {"ppo": {"batch_size": 64, "kl": {"controller": "adaptive", "horizon": horizon}}},
                "a file",
            )
    accepted = PpoConfig(batch_size=64, kl=KlConfig(controller="adaptive", horizon=13))
    controller = KlController(accepted.kl)
    controller.update(0.0, accepted.batch_size)
    assert 0 < controller.value < accepted.kl.coefficient


def test_running_moments_equal_those_of_all_scores_at_once() -> None:
    moments = RunningMeanStd()
    scores = torch.randn(97, generator=torch.Generator().manual_seed(0)).double() * 3 + 1
    for part in scores.split([1, 30, 5, 61]):
        moments.update(part)
    assert moments.count == 97
    assert moments.mean == pytest.approx(float(scores.mean()), abs=1e-12)
    assert moments.std == pytest.approx(float(scores.std()), abs=1e-12)


def test_running_moments_leave_out_what_is_not_finite() -> None:
    moments = RunningMeanStd()
    moments.update(t(1.0, NAN, 3.0, math.inf))
    assert (moments.count, moments.mean, moments.std) == (2, 2.0, pytest.approx(math.sqrt(2)))
    moments.update(t(NAN))
    assert moments.count == 2


def test_running_moments_floor() -> None:
    moments = RunningMeanStd()
    assert moments.std == 1.0
    moments.update(t(5.0))
    assert moments.std == 1.0
    moments.update(t(5.0, 5.0))
    assert moments.std == 1.0
    third = RunningMeanStd()
    third.update(torch.full((7,), 0.1))
    third.update(torch.full((3,), 0.1))
    assert third.std == 1.0


@pytest.mark.parametrize("level", [0.1, 3.7, -250.0])
def test_equal_float32_rewards_with_rounding_noise_count_as_equal(level: float) -> None:
    """A reward model gives equal replies equal scores up to its accumulation error, a few units in
    the last place.

    Divided by the spread of that noise they would become rewards of size 1 that mean nothing.
    """
    unit = abs(level) * 2.0**-23
    steps = torch.tensor([0, 1, -3, 2, -1, 5, -8, 8])
    noisy = (level + steps.double() * unit).float()
    assert float(noisy.double().std()) > 0
    moments = RunningMeanStd()
    moments.update(noisy)
    assert moments.std == 1.0
    normalized = normalize_and_clip_rewards(noisy, moments, RewardShapingConfig())
    assert float(normalized.abs().max()) < 1e-3


def test_a_small_but_real_spread_is_no_rounding_noise() -> None:
    moments = RunningMeanStd()
    moments.update(torch.tensor([1.0, 1.001]))
    assert moments.std == pytest.approx(0.001 / math.sqrt(2), rel=1e-3)


def test_moments_survive_json() -> None:
    moments = RunningMeanStd()
    moments.update(t(0.1, 0.7, -2.0))
    assert RunningMeanStd.from_dict(moments.to_dict()) == moments
    with pytest.raises(DataError, match="pre-train the critic"):
        RunningMeanStd.from_dict({"count": 1})


@pytest.mark.parametrize(
    ("transform", "clip", "expected"),
    [("none", None, [5.0, -1.0]), ("scale", None, [2.5, -0.5]), ("normalize", None, [2.0, -1.0]),
     ("normalize", 1.5, [1.5, -1.0]), ("none", 0.5, [0.5, -0.5])],
)  # fmt: skip
def test_transform_and_clip(transform: str, clip: float | None, expected: list[float]) -> None:
    moments = RunningMeanStd(5, 1.0, 3.2)  # sample standard deviation 2
    config = RewardShapingConfig(transform=transform, clip=clip)  # type: ignore[arg-type]
    assert close(normalize_and_clip_rewards(t(5.0, -1.0), moments, config), expected)


def test_the_clip_makes_no_reward_of_a_score_that_is_not_finite() -> None:
    got = normalize_and_clip_rewards(
        t(math.inf, -math.inf, NAN, 1.0), RunningMeanStd(), RewardShapingConfig()
    )
    assert close(got, [NAN, NAN, NAN, 1.0])


def test_shaping_is_in_standard_deviations() -> None:
    config = RewardShapingConfig(missing_eos_penalty=0.5, length_penalty=0.2)
    shaped = apply_penalties(
        t(1.0, 1.0), torch.tensor([32, 64]), torch.tensor([True, False]), config, 64
    )
    assert close(shaped, [0.9, 0.3])


def test_score_sits_on_the_last_response_token() -> None:
    """Trap 3: at the last response token (the end marker included), not one past it."""
    mask = torch.tensor([[True, True, False, False], [True, True, True, True]])
    rewards = token_rewards(t(3.0, 5.0), mask, torch.full((2, 4), NAN, dtype=torch.float64), 0.0)
    assert close(rewards, [[0, 3, 0, 0], [0, 0, 0, 5]])


def test_masked_kl_never_enters_the_reward() -> None:
    mask = torch.tensor([[True, False]])
    assert close(token_rewards(t(1.0), mask, t([0.5, NAN]), 0.1), [[0.95, 0.0]])
