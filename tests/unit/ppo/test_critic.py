"""The critic: pre-trained until it stops for a reason, on one backbone with the policy, or none
(RLOO and GRPO).
"""

from __future__ import annotations

import copy
import math
import random
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor
from unit.ppo import oracle
from unit.ppo.tables import PROMPT, HiddenTableLM, RecordingEngine, linear
from unit.ppo.tensors import NAN, close, t
from unit.ppo.test_oracle import VOCABULARY, Case, allowed_switches
from unit.ppo.tiny import Tiny, accumulate_gradients, collect, make_config, make_learner, make_tiny

from rlhf_core.config.loading import check_params
from rlhf_core.config.policy import CriticConfig
from rlhf_core.config.ppo import AdvantageConfig, PpoConfig, RolloutConfig
from rlhf_core.config.rates import with_chosen_rates
from rlhf_core.errors import ConfigError, ModelError
from rlhf_core.models.heads import ActorCritic, ScalarModel
from rlhf_core.ppo.actor_critic import ActorCriticPair
from rlhf_core.ppo.advantages import (
    group_metrics,
    group_relative_advantages,
    leave_one_out_advantages,
    with_group_advantages,
)
from rlhf_core.ppo.critic_pretraining import CriticTrainer, StopRule
from rlhf_core.ppo.experience import Experience
from rlhf_core.ppo.health import HealthMonitor
from rlhf_core.ppo.losses import entropy_sign
from rlhf_core.ppo.rollout import TrainingPrompts
from rlhf_core.ppo.update import Learner, measure_minibatch
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.sampling.token_scoring import MicroBatchLimits, Tokens
from rlhf_core.training.engine.base import LocalEngine
from rlhf_core.training.run_context import RunContext

RLOO = {"advantage": {"estimator": "rloo"}, "replies_per_prompt": 4}


def test_leave_one_out_by_hand() -> None:
    # Others of 1: (2 + 6) / 2 = 4; of 2: (1 + 6) / 2 = 3.5; of 6: (1 + 2) / 2 = 1.5.
    assert close(
        leave_one_out_advantages(t([1.0, 2.0, 6.0], [3.0, 3.0, 3.0])),
        [[-3.0, -1.5, 4.5], [0.0, 0.0, 0.0]],
    )
    assert close(leave_one_out_advantages(t([1.0, 4.0])), [[-3.0, 3.0]])


def test_group_relative_by_hand() -> None:
    # Mean 3; squared differences 4 + 1 + 9 = 14, over 2 is 7.
    rewards = t([1.0, 2.0, 6.0], [3.0, 3.0, 3.0])
    root = math.sqrt(7) + 1e-4
    expected = [[-2 / root, -1 / root, 3 / root], [0.0, 0.0, 0.0]]
    assert close(group_relative_advantages(rewards, divide_by_std=True), expected)
    assert close(
        group_relative_advantages(rewards, divide_by_std=False),
        [[-2.0, -1.0, 3.0], [0.0, 0.0, 0.0]],
    )


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
        mask, mask, mask, rewards > 0, unknown, unknown, mask, unknown, unknown, unknown, unknown, unknown, unknown,
        rewards, torch.ones_like(rewards).bool(), rewards, token_rewards, unknown, unknown, unknown,
    )  # fmt: skip


def test_a_reply_is_worth_its_reward_and_kl_and_padding_counts_nothing() -> None:
    # The KL penalty of each token and the reward at the last: 1 - 0.1 - 0.2, 3 - 0.3, then 0 - 0.5
    # and 0.5.
    token_rewards = t([-0.1, 0.8, NAN], [2.7, 9.0, 9.0], [0.0, 0.0, -0.5], [0.2, 0.3, 7.0])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 0]]).bool()
    experience = rollout(token_rewards, mask, torch.tensor([1.0, 3.0, 0.0, 0.0]))
    treated = with_group_advantages(experience, AdvantageConfig(estimator="rloo"), 2)
    assert close(
        treated.advantages,
        [[-2.0, -2.0, 0.0], [2.0, 0.0, 0.0], [-1.0, -1.0, -1.0], [1.0, 1.0, 0.0]],
    )
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
    spelled = {"value_clip": 0.2, "critic_optimizer": {"schedule": "constant", "warmup": 0.0}}
    assert PpoConfig.model_validate(RLOO | spelled).advantage.critic_free
    assert PpoConfig.model_validate(
        RLOO | {"value_clip": None, "critic_optimizer": None}
    ).advantage.critic_free
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


def test_groups_that_are_rewarded_alike_are_a_finding() -> None:
    monitor = HealthMonitor({"kl": 6.0, "max_new_tokens": 64.0})
    seen = [monitor.observe(iteration, {"equal_reward_groups": 0.9}) for iteration in range(1, 10)]
    assert [[finding.rule for finding in findings] for findings in seen[:4]] == [[]] * 4
    assert [finding.rule for findings in seen for finding in findings] == ["groups_rewarded_alike"]


def make(tiny: Tiny, work: Path, **changes: object) -> CriticTrainer:
    given = CriticConfig.model_validate(
        {"max_rollouts": 6, "batch_size": 8, "checkpoint": {"every": 2}} | changes
    )
    config = with_chosen_rates(given, new=True)
    engines = {"critic": LocalEngine(tiny.critic, config.optimizer, 24, "critic")}
    pair = ActorCriticPair(tiny.policy, tiny.critic, engines, tiny.sampling)
    rollout, prompts = RolloutConfig(max_new_tokens=7), TrainingPrompts([], tiny.prompts)
    return CriticTrainer(
        config=config,
        rollout=rollout,
        pair=pair,
        reward_fn=tiny.reward_fn,
        prompts=prompts,
        context=RunContext(work),
    )


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_stops_at_the_threshold_only_with_patience() -> None:
    rule = StopRule(threshold=0.7, patience=2, plateau=9)
    seen = [
        rule.observe(variance, 1.0 / step)
        for step, variance in enumerate((0.8, 0.5, 0.7, 0.71), start=1)
    ]
    assert seen == [None, None, None, "threshold"]


def test_stops_on_a_plateau() -> None:
    rule = StopRule(threshold=2.0, patience=1, plateau=2)
    assert [rule.observe(0.0, loss) for loss in (1.0, 0.5, 0.499, 0.51)] == [
        None,
        None,
        None,
        "plateau",
    ]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_never_the_best(bad: float) -> None:
    rule = StopRule(threshold=2.0, patience=1, plateau=2)
    assert [rule.observe(0.0, loss) for loss in (bad, 1.0, 0.5, bad, 0.25)] == [None] * 5
    assert (rule.best_loss, rule.since_best) == (0.25, 0)
    assert [rule.observe(0.0, bad) for _ in range(2)] == [None, "plateau"]


def test_a_first_rollout_with_a_reward_that_is_not_finite_ends_no_run(
    tiny: Tiny, tmp_path: Path
) -> None:
    trainer, rollouts = (
        make(tiny, tmp_path, max_rollouts=4, plateau=2, epochs=1, checkpoint={"every": 1}),
        [],
    )
    original = trainer.reward_fn

    def reward_fn(batch: Tokens) -> torch.Tensor:
        rollouts.append(len(batch.tokens))
        rewards = original(batch)
        return rewards.index_fill(0, torch.tensor([0]), math.nan) if len(rollouts) == 1 else rewards

    trainer.reward_fn = reward_fn
    trainer.run()
    losses = [row["value_loss"] for row in trainer.history.rows()]
    assert losses[0] is None and trainer.stop_rule.best_loss == min(losses[1:]) and len(losses) > 2


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


WEIGHT, HIDDEN = 0.4, 4
SHARED = {"critic_mode": "shared", "vf_loss_weight": WEIGHT}


def learner_of(
    policy: HiddenTableLM, score: Tensor, config: PpoConfig, reference: Any = None
) -> Learner:
    """One recording engine over a table of hidden states, an unembedding and a value head (1,
    H).
    """
    model = ActorCritic(policy, linear(score))  # type: ignore[arg-type]
    engine: Any = RecordingEngine(model)
    policy_model, limits = cast(Any, policy), MicroBatchLimits(config.micro_batch_size)
    pair = ActorCriticPair(policy_model, model, {"policy": engine}, Sampling(0, 0, 8), limits)
    return Learner(config, pair, reference)


def test_the_gradient_by_hand() -> None:
    """One hidden unit h = 0, logits (h, 0), value 3h; reply = token 0, advantage 2, return 0.5,
    ratio 1.

    Policy: -A dlog p0/dh = -2 (1 - 1/2) = -1. Value: (V - R) dV/dh = -0.5 * 3 = -1.5. Sum: -1 + 0.4
    * -1.5 = -1.6.
    """
    one = torch.ones(1, 1, dtype=torch.float64)
    fields: dict[str, Any] = dict.fromkeys(Experience.__dataclass_fields__, one)
    fields |= {
        "tokens": torch.tensor([[0, 1, 0]]),
        "attention_mask": torch.ones(1, 3, dtype=torch.long),
        "response_mask": torch.ones(1, 1, dtype=torch.bool),
        "old_logprobs": one * np.log(0.5),
        "values": one * 0.0,
        "advantages": one * 2.0,
        "returns": one * 0.5,
    }
    policy = HiddenTableLM(
        torch.zeros(1, 3, 1, dtype=torch.float64), torch.tensor([[1.0], [0.0]]).double()
    )
    learner = learner_of(policy, torch.tensor([[3.0]]).double(), make_config(**SHARED))
    metrics = accumulate_gradients(learner, Experience(**fields), 0.0, 0.0)
    # The state before the reply's token is at the last prompt position.
    assert policy.base_model.table.grad.flatten().tolist() == pytest.approx([0.0, -1.6, 0.0])  # type: ignore[union-attr]
    assert metrics["value_loss"] == pytest.approx(0.125) and metrics[
        "policy_loss"
    ] == pytest.approx(-2.0)
    assert learner.pair.engines["policy"].total == pytest.approx(-2.0 + 0.4 * 0.125)  # type: ignore[attr-defined]


class SharedCase(Case):
    """The oracle's batch where logits and values are two linear maps of the same hidden states."""

    def draw_model(self, g: np.random.Generator) -> None:
        self.hidden = g.normal(size=(self.count, PROMPT + len(self.lengths) + 2, HIDDEN))
        self.unembedding, self.score = (
            g.normal(size=(VOCABULARY, HIDDEN)),
            g.normal(size=(1, HIDDEN)),
        )
        self.apply()

    def apply(self) -> None:
        self.logits = self.hidden @ self.unembedding.T
        self.values = (self.hidden @ self.score.T)[..., 0]

    def objective(self) -> float:
        self.apply()
        batch = self.oracle_batch()
        return oracle.policy_loss(batch, self.s) + WEIGHT * oracle.value_loss(batch, self.s)

    def learner(self) -> Learner:
        policy = HiddenTableLM(
            torch.from_numpy(self.hidden.copy()), torch.from_numpy(self.unembedding)
        )
        return learner_of(
            policy, torch.from_numpy(self.score), self.config, super().learner().reference
        )


@pytest.mark.parametrize("seed", range(300, 316))
def test_loss_and_gradients_agree_with_the_oracle(seed: int) -> None:
    """Central differences of the oracle's policy loss + weight * value loss, for all three groups
    of parameters.
    """
    s = allowed_switches(seed)
    case = SharedCase(seed, s, [None, 1, 2, 3][seed % 4])
    case.config = case.config.model_copy(update=SHARED)
    learner, experience = case.learner(), case.experience()
    sign = entropy_sign(case.config.entropy, measure_minibatch(learner.pair, experience)["entropy"])
    accumulate_gradients(learner, experience, s.beta, sign)
    constant = sign * s.entropy_weight * s.entropy_target if s.entropy == "target" else 0.0
    assert learner.pair.engines["policy"].total - constant == pytest.approx(
        case.objective(), abs=1e-6
    ), s  # type: ignore
    critic: Any = learner.pair.critic  # type: ignore[attr-defined]
    places = [
        (case.hidden, critic.policy.base_model.table),
        (case.unembedding, critic.policy.head.weight),
        (case.score, critic.score.weight),
    ]
    draw, step = random.Random(seed), 1e-6
    for table, parameter in places:
        for _ in range(3):
            place = tuple(draw.randrange(size) for size in table.shape)
            sides = []
            for sign in (1, -1):
                table[place] += sign * step
                sides.append(case.objective())
                table[place] -= sign * step
            assert float(parameter.grad[place]) == pytest.approx(
                (sides[0] - sides[1]) / (2 * step), abs=3e-6
            ), s


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("size", [1, 3, 8])
def test_a_transformers_gradient_is_the_sum_of_two_separate_ones(tiny: Tiny, size: int) -> None:
    """The same batch through a policy and a critic of their own whose backbones are equal."""
    config = make_config(minibatches=1, micro_batch_size=size, **SHARED)
    experience = collect(tiny, config)
    learner = make_learner(tiny, config)
    value = accumulate_gradients(learner, experience, 0.2, 0.0)
    both = gradients(learner.pair.critic)  # type: ignore[arg-type]

    twin = make_tiny()
    twin.critic.model.set_submodule("model", copy.deepcopy(twin.policy.model))
    separate = make_learner(twin, make_config(minibatches=1, micro_batch_size=8))
    separate_value = accumulate_gradients(separate, experience, 0.2, 0.0)
    policy, critic = gradients(twin.policy), gradients(twin.critic)
    assert value["value_loss"] == pytest.approx(separate_value["value_loss"], rel=1e-4)
    for name, gradient in both.items():
        expected = policy.get(name.removeprefix("policy."), 0.0)
        expected = expected + WEIGHT * critic.get(
            f"model.{name.removeprefix('policy.')}", torch.zeros(())
        )
        assert torch.allclose(gradient, expected, atol=2e-6, rtol=1e-3), name
    assert "policy.model.layers.0.self_attn.q_proj.weight" in both and "score.weight" in both


def test_rollout_and_update_run_the_backbone_once_for_both(tiny: Tiny) -> None:
    bounds: dict[str, Any] = {"minibatches": 1, "micro_batch_size": 4, "micro_batch_tokens": None}
    config = make_config(**bounds, **SHARED)
    calls: list[bool] = []
    tiny.policy.base_model.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    experience = collect(tiny, config)
    separate = collect(make_tiny(), make_config(**bounds))
    assert torch.equal(experience.policy_logprobs, separate.policy_logprobs)
    calls.clear()
    accumulate_gradients(make_learner(tiny, config), experience, 0.05, 0.0)
    assert calls == [True, True]  # eight sequences in two micro-batches


def test_a_head_of_another_width_is_refused(tiny: Tiny) -> None:
    other = copy.deepcopy(tiny.critic.model)
    other.score = torch.nn.Linear(9, 1, bias=False)
    with pytest.raises(ModelError, match="16 hidden units; pre-train the critic again"):
        ActorCritic.with_head_of(ScalarModel(other), tiny.policy)
