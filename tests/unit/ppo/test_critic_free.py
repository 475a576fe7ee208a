"""RLOO and GRPO: hand-computed advantages, what is refused, and runs without a critic."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from architecture.glossary import undocumented
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor
from unit.ppo.tensors import NAN, close, t
from unit.ppo.test_trainer import history
from unit.ppo.tiny import Tiny, make_config, make_trainer

from rlhf_core.config.loading import check_params
from rlhf_core.config.ppo import AdvantageConfig, PpoConfig
from rlhf_core.errors import ConfigError
from rlhf_core.ppo.advantages import (
    group_metrics,
    group_relative_advantages,
    leave_one_out_advantages,
    with_group_advantages,
)
from rlhf_core.ppo.experience import Experience
from rlhf_core.ppo.health import HealthMonitor
from rlhf_core.ppo.rollout import TrainingPrompts

RLOO = {"advantage": {"estimator": "rloo"}, "replies_per_prompt": 4}


def test_leave_one_out_by_hand() -> None:
    # Others of 1: (2 + 6) / 2 = 4; of 2: (1 + 6) / 2 = 3.5; of 6: (1 + 2) / 2 = 1.5.
    assert close(leave_one_out_advantages(t([1.0, 2.0, 6.0], [3.0, 3.0, 3.0])), [[-3.0, -1.5, 4.5], [0.0, 0.0, 0.0]])
    assert close(leave_one_out_advantages(t([1.0, 4.0])), [[-3.0, 3.0]])


def test_group_relative_by_hand() -> None:
    # Mean 3; squared differences 4 + 1 + 9 = 14, over 2 is 7.
    rewards = t([1.0, 2.0, 6.0], [3.0, 3.0, 3.0])
    root = math.sqrt(7) + 1e-4
    expected = [[-2 / root, -1 / root, 3 / root], [0.0, 0.0, 0.0]]
    assert close(group_relative_advantages(rewards, divide_by_std=True), expected)
    assert close(group_relative_advantages(rewards, divide_by_std=False), [[-2.0, -1.0, 3.0], [0.0, 0.0, 0.0]])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=2, max_size=8), st.floats(-3, 3))
def test_what_all_replies_share_changes_nothing(rewards: list[float], shift: float) -> None:
    """And leave-one-out is the centred reward times K / (K - 1)."""
    group = torch.tensor([rewards], dtype=torch.float64)
    plain = leave_one_out_advantages(group)
    count = len(rewards)
    torch.testing.assert_close(leave_one_out_advantages(group + shift), plain, atol=1e-9, rtol=0)
    centred = group_relative_advantages(group, divide_by_std=False)
    torch.testing.assert_close(plain, centred * count / (count - 1), atol=1e-9, rtol=0)


def rollout(token_rewards: Tensor, mask: Tensor, rewards: Tensor) -> Experience:
    """What the group estimators read; all else is NaN."""
    unknown = torch.full_like(token_rewards, NAN)
    return Experience(
        mask, mask, mask, rewards > 0, unknown, unknown, unknown, unknown, unknown, unknown, unknown, rewards, rewards,
        token_rewards, unknown, unknown, unknown,
    )  # fmt: skip


def test_a_reply_is_worth_its_reward_and_kl_and_padding_counts_nothing() -> None:
    # The KL penalty of each token and the reward at the last: 1 - 0.1 - 0.2, 3 - 0.3, then 0 - 0.5 and 0.5.
    token_rewards = t([-0.1, 0.8, NAN], [2.7, 9.0, 9.0], [0.0, 0.0, -0.5], [0.2, 0.3, 7.0])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 0]]).bool()
    experience = rollout(token_rewards, mask, torch.tensor([1.0, 3.0, 0.0, 0.0]))
    treated = with_group_advantages(experience, AdvantageConfig(estimator="rloo"), 2)
    assert close(treated.advantages, [[-2.0, -2.0, 0.0], [2.0, 0.0, 0.0], [-1.0, -1.0, -1.0], [1.0, 1.0, 0.0]])
    assert bool(treated.returns.isnan().all() and treated.monte_carlo_returns.isnan().all())
    metrics = group_metrics(experience, 2)
    # Spreads of (0.7, 2.7) and (-0.5, 0.5); the raw rewards of the second prompt are equal.
    assert metrics["group_reward_std"] == pytest.approx((math.sqrt(2) + math.sqrt(0.5)) / 2)
    assert metrics["equal_reward_groups"] == 0.5


def test_a_reward_that_is_not_finite_spoils_its_own_group_alone() -> None:
    mask = torch.ones(4, 1, dtype=torch.bool)
    experience = rollout(t([NAN], [1.0], [2.0], [4.0]), mask, torch.tensor([NAN, 1.0, 2.0, 4.0]))
    for estimator in ("rloo", "grpo"):
        config = AdvantageConfig.model_validate({"estimator": estimator})
        advantages = with_group_advantages(experience, config, 2).advantages
        assert bool(advantages[:2].isnan().all()) and bool(advantages[2:].isfinite().all())


def test_each_prompt_comes_as_often_as_it_gets_replies_with_streams_of_their_own() -> None:
    prompts = TrainingPrompts([], [[n] for n in range(6)])
    rows = prompts.rows(8, 5, 3, replies_per_prompt=4)
    assert rows[:4] == [rows[0]] * 4 and rows[4:] == [rows[4]] * 4
    assert [rows[0], rows[4]] == prompts.rows(2, 5, 3)
    first, second = (prompts.batch(prompts.rows(8, 5, n, 4), n, 1).streams for n in (0, 1))
    assert len({*first, *second}) == 16


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "one reply": ({"replies_per_prompt": 1}, "sample at least 2"),
    "broken groups": ({"batch_size": 6}, "not a multiple of replies_per_prompt"),
    "whitening": ({"advantage": {"estimator": "rloo", "normalize": True}}, "in favour of long replies"),
    "discount": ({"advantage": {"estimator": "grpo", "gamma": 0.9}}, "gamma is read by estimator gae"),
    "lambda": ({"advantage": {"estimator": "rloo", "lam": 0.9}}, "lam is read by estimator gae"),
    "no division in rloo": ({"advantage": {"estimator": "rloo", "divide_by_std": False}}, "a switch of estimator grpo"),
    "value clip": ({"value_clip": 0.3}, "value_clip is about the critic.*: set it to null"),
    "value weight": ({"vf_loss_weight": 0.5}, "vf_loss_weight is about the critic.*: leave it at its default"),
    "critic optimizer": ({"critic_optimizer": {"lr": 1e-4}}, "critic_optimizer is about the critic.*: set it to null"),
    "critic adapters": ({"critic_lora": {"rank": 4}}, "critic_lora is about the critic.*: set it to null"),
    "shared backbone": ({"critic_mode": "shared", "critic_optimizer": None}, "critic_mode is about the critic"),
    "joint norm": ({"gradient_norm": "joint"}, "gradient_norm joint clips policy and critic together"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_do_not_fit_are_refused(case: str) -> None:
    changes, reason = REFUSED[case]
    with pytest.raises(ValidationError, match=reason):
        PpoConfig.model_validate({"batch_size": 8} | RLOO | changes)


def test_defaults_of_the_critic_may_be_spelled_out() -> None:
    spelled = {"value_clip": 0.2, "critic_optimizer": {"lr": 1e-3, "schedule": "constant", "warmup": 0.0}}
    assert PpoConfig.model_validate(RLOO | spelled).advantage.critic_free
    assert PpoConfig.model_validate(RLOO | {"value_clip": None, "critic_optimizer": None}).advantage.critic_free
    assert not PpoConfig(replies_per_prompt=4).advantage.critic_free


def test_learning_rates_of_a_critic_that_is_not_trained_are_not_looked_at() -> None:
    document = {
        "base": {"source": "org/model"}, "sft": {"optimizer": {"lr": 1e-5}},
        **{name: {"optimizer": {"lr": 1e-5}} for name in ("reward", "referee", "judge")},
        "critic": {"optimizer": {"lr": 1e-3}}, "ppo": {"policy_optimizer": {"lr": 1e-6, "warmup": 0.0}},
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"critic\.optimizer\.lr"):
        check_params(document)
    check_params(document | {"ppo": document["ppo"] | RLOO})


def test_a_run_without_a_critic(tiny: Tiny, tmp_path: Path) -> None:
    """With GRPO; RLOO is run as stages in training/test_ppo_stages.py."""
    before = [parameter.detach().clone() for parameter in tiny.policy.parameters()]
    grpo = {"advantage": {"estimator": "grpo"}, "replies_per_prompt": 2}
    trainer = make_trainer(tiny, make_config(iterations=2, **grpo), tmp_path)
    trainer.run()
    rows = history(tmp_path)
    assert len(rows) == 2 and undocumented(rows) == set()
    of_a_critic = {"explained_variance", "value_loss", "value_clip_fraction", "critic_lr", "critic_grad_norm"}
    assert not of_a_critic & {name for row in rows for name in row}
    assert all(row["group_reward_std"] > 0 and math.isfinite(row["policy_loss"]) for row in rows)
    assert any(not torch.equal(old, new) for old, new in zip(before, tiny.policy.parameters(), strict=True))
    assert list(trainer.learner.pair.engines) == ["policy"]
    saved = load_file(next(tmp_path.glob("checkpoints/step-000002/state-*.safetensors")))
    assert saved and not [name for name in saved if name.startswith("critic/")]


def test_groups_that_are_rewarded_alike_are_a_finding() -> None:
    monitor = HealthMonitor({"kl": 6.0, "max_new_tokens": 64.0})
    seen = [monitor.observe(iteration, {"equal_reward_groups": 0.9}) for iteration in range(1, 10)]
    assert [[finding.rule for finding in findings] for findings in seen[:4]] == [[]] * 4
    assert [finding.rule for findings in seen for finding in findings] == ["groups_rewarded_alike"]
