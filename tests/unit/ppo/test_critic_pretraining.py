"""Critic pre-training: it stops for a reason, leaves the policy alone and hands on its moments."""

from __future__ import annotations

from pathlib import Path

import torch
from unit.ppo.tiny import Tiny

from rlhf_core.config.policy import CriticConfig
from rlhf_core.config.ppo import RolloutConfig
from rlhf_core.ppo.actor_critic import ActorCriticPair
from rlhf_core.ppo.critic_pretraining import CriticTrainer, StopRule
from rlhf_core.ppo.rollout import TrainingPrompts
from rlhf_core.training.engine.base import LocalEngine
from rlhf_core.training.run_context import RunContext


def make(tiny: Tiny, work: Path, **changes: object) -> CriticTrainer:
    config = CriticConfig.model_validate({"max_rollouts": 6, "batch_size": 8, "checkpoint": {"every": 2}} | changes)
    return CriticTrainer(
        config=config,
        rollout=RolloutConfig(max_new_tokens=7),
        pair=ActorCriticPair(
            tiny.policy,
            tiny.critic,
            {"critic": LocalEngine(tiny.critic, config.optimizer, 24, "critic")},
            tiny.sampling,
        ),
        reward_fn=tiny.reward_fn,
        prompts=TrainingPrompts([], tiny.prompts),
        context=RunContext(work),
    )


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_stops_at_the_threshold_only_with_patience() -> None:
    rule = StopRule(threshold=0.7, patience=2, plateau=9)
    seen = [rule.observe(variance, 1.0 / step) for step, variance in enumerate((0.8, 0.5, 0.7, 0.71), start=1)]
    assert seen == [None, None, None, "threshold"]


def test_stops_on_a_plateau() -> None:
    rule = StopRule(threshold=2.0, patience=1, plateau=2)
    assert [rule.observe(0.0, loss) for loss in (1.0, 0.5, 0.499, 0.51)] == [None, None, None, "plateau"]


def test_learns_with_the_policy_frozen(tiny: Tiny, tmp_path: Path) -> None:
    policy, critic = flat(tiny.policy), flat(tiny.critic)
    trainer = make(tiny, tmp_path, max_rollouts=4, batch_size=32, explained_variance=1.0, epochs=6)
    trainer.run()
    rows = trainer.history.rows()
    assert torch.equal(policy, flat(tiny.policy)) and not torch.equal(critic, flat(tiny.critic))
    assert rows[-1]["explained_variance"] > rows[0]["explained_variance"] + 0.2
    assert trainer.summary()["rollouts"] == len(rows) and trainer.moments.count == 32 * len(rows)


def test_no_rollouts_means_only_an_initial_critic(tiny: Tiny, tmp_path: Path) -> None:
    before = flat(tiny.critic)
    trainer = make(tiny, tmp_path, max_rollouts=0)
    trainer.run()
    assert trainer.summary()["rollouts"] == 0
    assert torch.equal(before, flat(tiny.critic)) and trainer.moments.count == 0
