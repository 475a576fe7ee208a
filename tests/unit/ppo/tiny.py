"""A random Llama of a few thousand parameters, scalar models of its kind, and a PPO run over them."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from rlhf_core.config.ppo import PpoConfig
from rlhf_core.models.actor_critic import ActorCritic
from rlhf_core.models.heads import ScalarModel
from rlhf_core.ppo.health_monitor import Monitor
from rlhf_core.ppo.ptx import PtxData
from rlhf_core.ppo.rewards import RunningMeanStd
from rlhf_core.ppo.rollout import Actors, model_scorer
from rlhf_core.ppo.trainer import Prompts, Trainer, Verdict
from rlhf_core.ppo.update import Learner
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.training.engine import LocalEngine
from rlhf_core.training.run_context import RunContext

EOS, PAD, VOCABULARY = 3, 0, 23
BASE = {
    "iterations": 4,
    "batch_size": 8,
    "max_new_tokens": 7,
    "warmup_iterations": 1,
    "selection": {"every": 2},
    "checkpoint": {"every": 1},
    "health": {"mode": "report"},
    "ptx": {"weight": 0.1, "batch_size": 3},
    "policy_optimizer": {"lr": 3e-3, "schedule": "constant", "warmup": 0.0},
    "critic_optimizer": {"lr": 3e-3, "schedule": "constant", "warmup": 0.0},
}


@dataclass
class Tiny:
    """The models that a run needs."""

    policy: LlamaForCausalLM
    reference: LlamaForCausalLM
    critic: ScalarModel
    reward: ScalarModel
    prompts: list[list[int]]
    sampling: Sampling

    def copy(self) -> Tiny:
        return copy.deepcopy(self)

    @property
    def actors(self) -> Actors:
        return Actors(self.policy, self.reference, self.critic, model_scorer(self.reward, None))


def make_tiny() -> Tiny:
    """The same models every time; end markers are likely, so that replies have many lengths."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            max_position_embeddings=64, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None, initializer_range=0.3,
            attn_implementation="sdpa",
        )  # fmt: skip
        policy = LlamaForCausalLM(config).eval()
        with torch.no_grad():
            policy.lm_head.weight[EOS] += 0.2 * torch.randn(16).abs()
        config.num_labels = 1
        critic, reward = (ScalarModel(LlamaForSequenceClassification(config).eval()) for _ in range(2))
    draw = random.Random(0)
    prompts = [[draw.randrange(4, VOCABULARY) for _ in range(draw.randint(1, 6))] for _ in range(20)]
    return Tiny(policy, copy.deepcopy(policy), critic, reward, prompts, Sampling(EOS, PAD, 7))


class ScriptedSelector:
    """Keeps the checkpoint with the smallest first weight: an arbitrary but exact rule."""

    def __init__(self) -> None:
        self.best: float | None = None
        self.seen: list[int] = []

    def consider(self, iteration: int, policy: Any) -> Verdict:
        value = float(next(policy.parameters()).detach().flatten()[5])
        self.seen.append(iteration)
        keep = self.best is None or value < self.best
        self.best = value if keep else self.best
        return Verdict({"win_rate": 0.5 + value, "kl": value}, keep)

    def state(self) -> dict[str, Any]:
        return {"best": self.best, "seen": self.seen}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.best, self.seen = state["best"], list(state["seen"])


def make_config(**changes: Any) -> PpoConfig:
    without = {"critic_optimizer": None} if changes.get("critic_mode") == "shared" else {}
    return PpoConfig.model_validate(BASE | without | changes)


def make_learner(tiny: Tiny, config: PpoConfig) -> Learner:
    per_iteration = config.epochs * config.minibatches
    total, warmup = config.iterations * per_iteration, config.warmup_iterations * per_iteration or None
    pairs = [(prompt, [*reversed(prompt), EOS]) for prompt in tiny.prompts]
    critic: ScalarModel | ActorCritic = tiny.critic
    if config.critic_mode == "shared":
        critic = ActorCritic.with_head_of(tiny.critic, tiny.policy)
        engine = LocalEngine(critic, config.policy_optimizer, total, "policy", warmup)
        engines = (engine, engine)
    else:
        assert config.critic_optimizer is not None
        engines = (
            LocalEngine(tiny.policy, config.policy_optimizer, total, "policy", warmup),
            LocalEngine(tiny.critic, config.critic_optimizer, total, "critic", warmup),
        )
    return Learner(
        config=config,
        sampling=Sampling(EOS, PAD, config.max_new_tokens, config.temperature, config.min_new_tokens),
        policy=tiny.policy,
        policy_engine=engines[0],
        critic=critic,
        critic_engine=engines[1],
        reference=tiny.reference,
        ptx=PtxData(pairs, config.ptx.batch_size, 5, PAD) if config.ptx.weight else None,
    )


def make_trainer(tiny: Tiny, config: PpoConfig, work: Path, **changes: Any) -> Trainer:
    learner = make_learner(tiny, config)
    parts: dict[str, Any] = {
        "learner": learner,
        "actors": replace(tiny.actors, critic=learner.critic),
        "prompts": Prompts(
            tiny.prompts,
            [str(prompt) for prompt in tiny.prompts],
            lambda ids: " ".join(str(i) for i in ids if i != EOS),
        ),
        "moments": RunningMeanStd(),
        "monitor": Monitor({"kl": 6.0, "max_new_tokens": config.max_new_tokens}),
        "selector": ScriptedSelector(),
        "context": RunContext(work),
        "referee": model_scorer(tiny.reward, None),
    }
    return Trainer(**(parts | changes))
