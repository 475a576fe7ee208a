"""Policy and critic on one backbone: its gradient is the weighted sum of both, from one pass."""

from __future__ import annotations

import copy
import random
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from unit.ppo import oracle
from unit.ppo.tables import PROMPT, HiddenTableLM, RecordingEngine, linear
from unit.ppo.test_oracle import VOCABULARY, Case, allowed_switches
from unit.ppo.tiny import Tiny, accumulate_gradients, collect, make_config, make_learner, make_tiny

from rlhf_core.config.ppo import PpoConfig
from rlhf_core.errors import ModelError
from rlhf_core.models.heads import ActorCritic, ScalarModel
from rlhf_core.ppo.actor_critic import ActorCriticPair
from rlhf_core.ppo.experience import Experience
from rlhf_core.ppo.losses import entropy_sign
from rlhf_core.ppo.update import Learner, measure_minibatch
from rlhf_core.sampling.distribution import Sampling

WEIGHT, HIDDEN = 0.4, 4
SHARED = {"critic_mode": "shared", "vf_loss_weight": WEIGHT}


def learner_of(policy: HiddenTableLM, score: Tensor, config: PpoConfig, reference: Any = None) -> Learner:
    """One recording engine over a table of hidden states, an unembedding and a value head (1, H)."""
    model = ActorCritic(policy, linear(score))  # type: ignore[arg-type]
    engine: Any = RecordingEngine(model)
    policy_model, size = cast(Any, policy), config.micro_batch_size
    pair = ActorCriticPair(policy_model, model, {"policy": engine}, Sampling(0, 0, 8), size)
    return Learner(config, pair, reference)


def test_the_gradient_by_hand() -> None:
    """One hidden unit h = 0, logits (h, 0), value 3h; reply = token 0, advantage 2, return 0.5, ratio 1.

    Policy: -A dlog p0/dh = -2 (1 - 1/2) = -1. Value: (V - R) dV/dh = -0.5 * 3 = -1.5. Sum: -1 + 0.4 * -1.5 = -1.6.
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
    policy = HiddenTableLM(torch.zeros(1, 3, 1, dtype=torch.float64), torch.tensor([[1.0], [0.0]]).double())
    learner = learner_of(policy, torch.tensor([[3.0]]).double(), make_config(**SHARED))
    metrics = accumulate_gradients(learner, Experience(**fields), 0.0, 0.0)
    # The state before the reply's token is at the last prompt position.
    assert policy.base_model.table.grad.flatten().tolist() == pytest.approx([0.0, -1.6, 0.0])  # type: ignore[union-attr]
    assert metrics["value_loss"] == pytest.approx(0.125) and metrics["policy_loss"] == pytest.approx(-2.0)
    assert learner.pair.engines["policy"].total == pytest.approx(-2.0 + 0.4 * 0.125)  # type: ignore[attr-defined]


class SharedCase(Case):
    """The oracle's batch where logits and values are two linear maps of the same hidden states."""

    def draw_model(self, g: np.random.Generator) -> None:
        self.hidden = g.normal(size=(self.count, PROMPT + len(self.lengths) + 2, HIDDEN))
        self.unembedding, self.score = g.normal(size=(VOCABULARY, HIDDEN)), g.normal(size=(1, HIDDEN))
        self.apply()

    def apply(self) -> None:
        self.logits = self.hidden @ self.unembedding.T
        self.values = (self.hidden @ self.score.T)[..., 0]

    def objective(self) -> float:
        self.apply()
        batch = self.oracle_batch()
        return oracle.policy_loss(batch, self.s) + WEIGHT * oracle.value_loss(batch, self.s)

    def learner(self) -> Learner:
        policy = HiddenTableLM(torch.from_numpy(self.hidden.copy()), torch.from_numpy(self.unembedding))
        return learner_of(policy, torch.from_numpy(self.score), self.config, super().learner().reference)


@pytest.mark.parametrize("seed", range(300, 316))
def test_loss_and_gradients_agree_with_the_oracle(seed: int) -> None:
    """Central differences of the oracle's policy loss + weight * value loss, for all three groups of parameters."""
    s = allowed_switches(seed)
    case = SharedCase(seed, s, [None, 1, 2, 3][seed % 4])
    case.config = case.config.model_copy(update=SHARED)
    learner, experience = case.learner(), case.experience()
    sign = entropy_sign(case.config.entropy, measure_minibatch(learner.pair, experience)["entropy"])
    accumulate_gradients(learner, experience, s.beta, sign)
    constant = sign * s.entropy_weight * s.entropy_target if s.entropy == "target" else 0.0
    assert learner.pair.engines["policy"].total - constant == pytest.approx(case.objective(), abs=1e-6), s  # type: ignore
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
            assert float(parameter.grad[place]) == pytest.approx((sides[0] - sides[1]) / (2 * step), abs=3e-6), s


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
        expected = expected + WEIGHT * critic.get(f"model.{name.removeprefix('policy.')}", torch.zeros(()))
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
    with pytest.raises(ModelError, match="16 hidden units; run the critic stage again"):
        ActorCritic.with_head_of(ScalarModel(other), tiny.policy)
