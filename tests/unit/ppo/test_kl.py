"""KL estimators, their gradients and the controllers of the coefficient, by hand-computed numbers."""

from __future__ import annotations

import math

import pytest
import torch
from unit.ppo.tensors import NAN, close, t

from rlhf_core.config.loading import check_params
from rlhf_core.config.ppo import KlConfig, PpoConfig
from rlhf_core.errors import ConfigError
from rlhf_core.ppo.kl import KlController, kl_estimate, kl_pull
from rlhf_core.ppo.rewards import token_rewards
from rlhf_core.sampling.token_scoring import full_kl


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
    """In the loss k2 and full give the gradient of reverse KL; k1 gives none on average, so it is refused there."""
    logits = t([0.3, -1.0, 0.9])[0].requires_grad_()
    q = torch.log_softmax(t([-0.2, 0.4, 0.1])[0], 0)
    p = torch.log_softmax(logits, 0)
    true = torch.autograd.grad(full_kl(p, q), logits, retain_graph=True)[0]
    loss = full_kl(p, q) if estimator == "full" else (p.detach().exp() * kl_estimate(p, q, estimator)).sum()
    got = torch.autograd.grad(loss, logits)[0]
    assert close(got, true * cosine, 1e-7)


def test_adaptive_controller() -> None:
    controller = KlController(KlConfig(coefficient=0.1, controller="adaptive", target=6.0, horizon=1000))
    controller.update(6.6, 100)  # error 0.1
    assert controller.value == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    controller.update(60.0, 100)  # clipped to 0.2
    assert controller.value == pytest.approx(0.1 * 1.01 * 1.02)
    before = controller.value
    for kl in (NAN, math.inf, -math.inf):
        controller.update(kl, 100)
        assert controller.value == before


def test_adaptive_controller_never_turns_negative() -> None:
    """Without a floor a rollout of 64 at horizon 10 would multiply the coefficient by 1 - 0.2 * 64 / 10 = -0.28."""
    controller = KlController(KlConfig(coefficient=0.05, controller="adaptive", horizon=10))
    controller.update(0.0, 64)
    assert controller.value == pytest.approx(0.005)
    controller.update(0.0, 40)  # 1 - 0.2 * 4 = 0.2, above the floor
    assert controller.value == pytest.approx(0.001)


def test_a_horizon_at_which_one_rollout_would_turn_the_coefficient_is_refused_by_its_path() -> None:
    for horizon in (10, 12):
        with pytest.raises(
            ConfigError, match=rf"'ppo'.*kl\.horizon {horizon} is too short for batch_size 64.*above 12"
        ):
            check_params({"ppo": {"batch_size": 64, "kl": {"controller": "adaptive", "horizon": horizon}}}, "a file")
    accepted = PpoConfig(batch_size=64, kl=KlConfig(controller="adaptive", horizon=13))
    controller = KlController(accepted.kl)
    controller.update(0.0, accepted.batch_size)
    assert 0 < controller.value < accepted.kl.coefficient
