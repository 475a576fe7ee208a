"""The tensor code against an independent NumPy oracle in float64, over sampled combinations of the
switches.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from unit.ppo import oracle
from unit.ppo.tables import PROMPT, RecordingEngine, TableCritic, TableLM
from unit.ppo.tiny import accumulate_gradients

from rlhf_core.config.ppo import PpoConfig
from rlhf_core.ppo.actor_critic import ActorCriticPair
from rlhf_core.ppo.advantages import estimate_advantages
from rlhf_core.ppo.experience import Experience
from rlhf_core.ppo.losses import entropy_sign, with_fixed_reference
from rlhf_core.ppo.rewards import RunningMeanStd, with_rewards
from rlhf_core.ppo.update import Learner, measure_minibatch
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.sampling.generation import Rollout
from rlhf_core.sampling.token_scoring import MicroBatchLimits

VOCABULARY, WIDTH = 5, 6
CHOICES: dict[str, list[Any]] = {
    "transform": ["none", "scale", "normalize"], "reward_clip": [None, 0.3, 2.0],
    "missing_eos_penalty": [0.0, 0.7], "length_penalty": [0.0, 0.4],
    "beta": [0.0, 0.05, 0.5], "placement": ["reward", "loss"], "estimator": ["k1", "k2", "k3", "full"],
    "gamma": [1.0, 0.9], "lam": [0.0, 0.95, 1.0], "normalize": [False, True], "advantage_clip": [None, 0.5],
    "kind": ["clip", "penalty"], "clip": [None, 0.2], "dual_clip": [None, 1.5], "aggregation": ["token", "sequence"],
    "fixed_reference": [False, True], "entropy": ["off", "bonus", "target"], "value_clip": [None, 0.2],
    "correction_cap": [None, 1.2, 2.0],
}  # fmt: skip


def config_of(s: oracle.Switches, micro_batch_size: int | None) -> PpoConfig:
    correction = (
        {"mode": "never"}
        if s.correction_cap is None
        else {"mode": "always", "cap": s.correction_cap}
    )
    return PpoConfig.model_validate({
        "batch_size": 4, "minibatches": 1, "micro_batch_size": micro_batch_size, "max_new_tokens": s.max_new_tokens,
        "replies_per_prompt": s.replies_per_prompt, "value_clip": s.value_clip,
        "importance_sampling_correction": correction,
        "kl": {"coefficient": s.beta, "estimator": s.estimator, "placement": s.placement},
        "reward": {"transform": s.transform, "clip": s.reward_clip, "missing_eos_penalty": s.missing_eos_penalty,
                   "length_penalty": s.length_penalty},
        "advantage": {"estimator": s.advantage_estimator, "gamma": s.gamma, "lam": s.lam, "normalize": s.normalize,
                      "clip": s.advantage_clip, "divide_by_std": s.divide_by_std},
        "surrogate": {"kind": s.kind, "clip": s.clip, "dual_clip": s.dual_clip, "penalty": s.penalty,
                      "aggregation": s.aggregation, "fixed_reference": s.fixed_reference},
        "entropy": {"kind": s.entropy, "weight": s.entropy_weight, "target": s.entropy_target},
    })  # fmt: skip


CRITIC_FREE: dict[str, list[Any]] = {
    "advantage_estimator": ["rloo", "grpo"], "replies_per_prompt": [2, 4], "divide_by_std": [False, True],
    "gamma": [1.0], "lam": [0.95], "normalize": [False],
}  # fmt: skip


def allowed_switches(seed: int, choices: Mapping[str, list[Any]] = CHOICES) -> oracle.Switches:
    """A random combination that the parameters accept; contradictory ones are drawn again."""
    draw = random.Random(seed)
    while True:
        s = oracle.Switches(**{name: draw.choice(values) for name, values in choices.items()})
        s.entropy_weight = 0.0 if s.entropy == "off" else 0.3
        s.entropy_target = 1.2 if s.entropy == "target" else 0.0
        try:
            config_of(s, None)
        except ValidationError:
            continue
        return s


class Case:
    """The same random batch for both sides: lists for the oracle, tensors for the project.

    ``logits`` and ``values`` are tables of their own here.
    """

    def __init__(self, seed: int, s: oracle.Switches, micro_batch_size: int | None) -> None:
        self.s, self.config = s, config_of(s, micro_batch_size)
        g = np.random.default_rng(seed)
        self.count = 4
        self.lengths = g.integers(1, WIDTH + 1, self.count)
        self.draw_model(g)
        self.ref_logits = self.logits + 0.5 * g.normal(size=self.logits.shape)
        self.old_logits = self.logits + 0.3 * g.normal(size=self.logits.shape)
        self.old_values = self.values + 0.4 * g.normal(size=self.values.shape)
        self.response = g.integers(0, VOCABULARY, (self.count, WIDTH))
        self.scores = g.normal(size=self.count) * 2
        self.history = list(g.normal(size=7))
        self.finished = g.random(self.count) < 0.6
        self.sampler_logits = self.old_logits + 0.5 * g.normal(size=self.logits.shape)

    def draw_model(self, g: np.random.Generator) -> None:
        self.logits = g.normal(size=(self.count, PROMPT + WIDTH, VOCABULARY))
        self.values = g.normal(size=(self.count, PROMPT + WIDTH))

    def oracle_batch(self) -> list[oracle.Sequence]:
        everything = (self.logits, self.ref_logits, self.old_logits, self.sampler_logits)
        new, ref, old, sampler = (log_softmax(x) for x in everything)
        batch = []
        for b, n in enumerate(self.lengths):
            at = range(PROMPT - 1, PROMPT - 1 + n)
            token = [int(x) for x in self.response[b, :n]]
            batch.append(
                oracle.Sequence(
                    sampler=[sampler[b, p, k] for p, k in zip(at, token, strict=True)],
                    old=[old[b, p, k] for p, k in zip(at, token, strict=True)],
                    ref=[ref[b, p, k] for p, k in zip(at, token, strict=True)],
                    new=[list(new[b, p]) for p in at],
                    ref_dist=[list(ref[b, p]) for p in at],
                    token=token,
                    old_values=[self.old_values[b, p] for p in at],
                    values=[self.values[b, p] for p in at],
                    score=self.scores[b],
                    finished=bool(self.finished[b]),
                )
            )
        oracle.rewards(batch, self.history, self.s)
        oracle.advantages(batch, self.s)
        return batch

    def experience(self) -> Experience:
        lengths = torch.from_numpy(self.lengths)
        mask = torch.arange(WIDTH).unsqueeze(0) < lengths.unsqueeze(1)
        prompt = torch.stack(
            [torch.arange(self.count), torch.ones(self.count, dtype=torch.long)], 1
        )
        tokens = torch.cat([prompt, torch.from_numpy(self.response)], 1)
        attention = torch.cat([torch.ones_like(prompt), mask.long()], 1)

        def picked(logits: np.ndarray) -> torch.Tensor:
            rows = torch.from_numpy(log_softmax(logits))[:, PROMPT - 1 : -1]
            # Garbage at masked positions must not matter.
            return (
                rows.gather(-1, torch.from_numpy(self.response).unsqueeze(-1))
                .squeeze(-1)
                .where(mask, 1e3)
            )

        zeros = torch.zeros(self.count, WIDTH, dtype=torch.float64)
        values = torch.from_numpy(self.old_values)[:, PROMPT - 1 : -1].where(mask, -1e3)
        rollout = Rollout(
            tokens, attention, mask, picked(self.sampler_logits), torch.from_numpy(self.finished)
        )
        predictions = picked(self.old_logits), picked(self.ref_logits), zeros, values
        moments = RunningMeanStd()
        moments.update(torch.tensor(self.history, dtype=torch.float64))
        experience = Experience.of_rollout(rollout, *predictions)
        rewards = torch.from_numpy(self.scores)
        moments.update(rewards)
        experience = with_rewards(experience, rewards, moments, self.s.beta, self.config.rollout)
        experience = estimate_advantages(
            experience, self.config.advantage, self.config.replies_per_prompt
        )
        return with_fixed_reference(experience) if self.s.fixed_reference else experience

    def learner(self) -> Learner:
        policy, critic = (
            TableLM(torch.from_numpy(self.logits)),
            TableCritic(torch.from_numpy(self.values)),
        )
        engines: Any = {"policy": RecordingEngine(policy), "critic": RecordingEngine(critic)}
        sampling, lm = Sampling(0, 0, self.s.max_new_tokens), cast(Any, policy)
        limits = MicroBatchLimits(self.config.micro_batch_size)
        pair = ActorCriticPair(lm, critic, engines, sampling, limits)
        if self.config.advantage.critic_free:
            pair = ActorCriticPair(lm, None, {"policy": engines["policy"]}, sampling, limits)
        reference: Any = TableLM(torch.from_numpy(self.ref_logits))
        return Learner(self.config, pair, reference)

    def losses(self) -> tuple[float, float, Learner]:
        """The project's policy and value loss, with gradients left on the tables."""
        learner, experience = self.learner(), self.experience()
        sign = entropy_sign(
            self.config.entropy, measure_minibatch(learner.pair, experience)["entropy"]
        )
        accumulate_gradients(learner, experience, self.s.beta, sign)
        # |H - target| has a constant that no gradient needs and the project leaves out.
        constant = (
            sign * self.s.entropy_weight * self.s.entropy_target
            if self.s.entropy == "target"
            else 0.0
        )
        policy, *critics = learner.pair.engines.values()
        value = critics[0].total if critics else 0.0  # type: ignore[attr-defined]
        return policy.total - constant, value, learner  # type: ignore[attr-defined]


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


SAMPLED = [(CHOICES, range(120)), (CHOICES | CRITIC_FREE, range(300, 340))]


@pytest.mark.parametrize(
    ("choices", "seed"), [(choices, seed) for choices, seeds in SAMPLED for seed in seeds]
)
def test_tensor_code_agrees_with_the_oracle(choices: Mapping[str, list[Any]], seed: int) -> None:
    s = allowed_switches(seed, choices)
    case = Case(seed, s, [None, 1, 2, 3][seed % 4])
    batch, experience = case.oracle_batch(), case.experience()
    policy, value, learner = case.losses()
    for b, q in enumerate(batch):
        n = len(q.old)
        np.testing.assert_allclose(experience.token_rewards[b, :n].numpy(), q.rewards, atol=1e-6)
        np.testing.assert_allclose(experience.advantages[b, :n].numpy(), q.advantages, atol=1e-6)
        assert not experience.advantages[b, n:].any()
        if learner.pair.critic is not None:
            np.testing.assert_allclose(experience.returns[b, :n].numpy(), q.returns, atol=1e-6)
    assert policy == pytest.approx(oracle.policy_loss(batch, s), abs=1e-6), s
    assert (
        list(learner.pair.engines)
        == ["policy", "critic"][: 1 if s.advantage_estimator != "gae" else 2]
    )
    if learner.pair.critic is not None:
        assert value == pytest.approx(oracle.value_loss(batch, s), abs=1e-6), s


@pytest.mark.parametrize("seed", range(200, 212))
def test_gradient_agrees_with_finite_differences_of_the_oracle(seed: int) -> None:
    """Central differences of the oracle's whole objective against the gradients that the engines
    received.
    """
    s = allowed_switches(seed)
    case = Case(seed, s, 2)
    _, _, learner = case.losses()
    step = 1e-6
    draw = random.Random(seed)
    for _ in range(8):
        b, v = draw.randrange(case.count), draw.randrange(VOCABULARY)
        p = PROMPT - 1 + draw.randrange(int(case.lengths[b]))
        sides = []
        for sign in (1, -1):
            case.logits[b, p, v] += sign * step
            case.values[b, p] += sign * step
            batch = case.oracle_batch()
            sides.append((oracle.policy_loss(batch, s), oracle.value_loss(batch, s)))
            case.logits[b, p, v] -= sign * step
            case.values[b, p] -= sign * step
        numeric = [(up - down) / (2 * step) for up, down in zip(*sides, strict=True)]
        assert float(learner.pair.policy.table.grad[b, p, v]) == pytest.approx(
            numeric[0], abs=2e-6
        ), s  # type: ignore
        assert float(learner.pair.critic.table.grad[b, p]) == pytest.approx(numeric[1], abs=2e-6), s  # type: ignore


def test_every_switch_value_was_sampled() -> None:
    for choices, seeds in SAMPLED:
        seen = [allowed_switches(seed, choices) for seed in seeds]
        for name, values in (CRITIC_FREE if seeds.start else CHOICES).items():
            assert {getattr(s, name) for s in seen} == set(values)
