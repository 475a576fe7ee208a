"""A random Llama of a few thousand parameters, scalar models of its kind, and a PPO run over
them.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from rlhf_core.config.health import DEFAULT_RULES, Rule
from rlhf_core.config.ppo import PpoConfig
from rlhf_core.data.schema import Message
from rlhf_core.models.forward import LOGITS_BYTES
from rlhf_core.models.heads import ActorCritic, ScalarModel
from rlhf_core.ppo.actor_critic import ActorCriticPair
from rlhf_core.ppo.advantages import estimate_advantages
from rlhf_core.ppo.experience import Experience
from rlhf_core.ppo.health import HealthGuard, HealthMonitor
from rlhf_core.ppo.losses import with_fixed_reference
from rlhf_core.ppo.reward_sources.source import RewardFn, reward_model_fn
from rlhf_core.ppo.rewards import RunningMeanStd, with_rewards
from rlhf_core.ppo.rollout import TrainingPrompts, score_rollout
from rlhf_core.ppo.selection import CheckpointSelector, MeasurePolicy
from rlhf_core.ppo.trainer import Trainer
from rlhf_core.ppo.update import Learner, PtxData, gradient_tasks
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.sampling.sampler import LocalSampler, PromptBatch, sample_replies
from rlhf_core.sampling.token_scoring import MicroBatchLimits
from rlhf_core.tracking.stage_run import Tracker
from rlhf_core.training.engine.base import LocalEngine
from rlhf_core.training.passes import totals_of_steps
from rlhf_core.training.run_context import RunContext

EOS, PAD, VOCABULARY = 3, 0, 23
RATE = {"lr": 3e-3, "schedule": "constant", "warmup": 0.0}
BASE = {
    "iterations": 4, "batch_size": 8, "max_new_tokens": 7, "warmup_iterations": 1, "selection": {"every": 2},
    "checkpoint": {"every": 1}, "health": {"mode": "report"}, "ptx": {"weight": 0.1, "batch_size": 3},
    "policy_optimizer": RATE, "critic_optimizer": RATE,
}  # fmt: skip


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
    def reward_fn(self) -> RewardFn:
        return reward_model_fn(self.reward)

    def untrained_pair(
        self, sampling: Sampling | None = None, micro_batch_size: int | None = None
    ) -> ActorCriticPair:
        """Policy and critic without engines, for what only looks at them."""
        limits = MicroBatchLimits(micro_batch_size)
        return ActorCriticPair(self.policy, self.critic, {}, sampling or self.sampling, limits)


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
        critic, reward = (
            ScalarModel(LlamaForSequenceClassification(config).eval()) for _ in range(2)
        )
    draw = random.Random(0)
    prompts = [
        [draw.randrange(4, VOCABULARY) for _ in range(draw.randint(1, 6))] for _ in range(20)
    ]
    return Tiny(policy, copy.deepcopy(policy), critic, reward, prompts, Sampling(EOS, PAD, 7))


def first_weight(policy: Any) -> dict[str, float]:
    """A measure by which the checkpoint with the smallest first weight is the best: an arbitrary
    but exact rule.
    """
    value = float(next(policy.parameters()).detach().flatten()[5])
    return {"win_rate": 0.5 - value, "kl": value, "length_ratio": 1.0, "repetition_increase": 0.0}


def make_config(**changes: Any) -> PpoConfig:
    critic_free = changes.get("advantage", {}).get("estimator", "gae") != "gae"
    without = (
        {"critic_optimizer": None} if critic_free or changes.get("critic_mode") == "shared" else {}
    )
    return PpoConfig.model_validate(BASE | without | changes)


def make_learner(
    tiny: Tiny, config: PpoConfig, logits_bytes: int = LOGITS_BYTES, **limits: int
) -> Learner:
    """Policy and critic with their engines; ``limits`` of a pass take the place of the config's."""
    bounds = config.model_copy(update=limits)
    per_iteration = config.epochs * config.minibatches
    total, warmup = config.iterations * per_iteration, config.warmup * per_iteration or None
    pairs = [(prompt, [*reversed(prompt), EOS]) for prompt in tiny.prompts]
    sampling = Sampling(EOS, PAD, config.max_new_tokens, config.temperature, config.min_new_tokens)
    critic: Any = tiny.critic
    if config.advantage.critic_free:
        critic = None
    elif config.critic_mode == "shared":
        critic = ActorCritic.with_head_of(tiny.critic, tiny.policy)
    trained = critic if isinstance(critic, ActorCritic) else tiny.policy
    engines = {"policy": LocalEngine(trained, config.policy_optimizer, total, "policy", warmup)}
    if critic is tiny.critic:
        assert config.critic_optimizer is not None
        engines["critic"] = LocalEngine(
            tiny.critic, config.critic_optimizer, total, "critic", warmup
        )
    passes = MicroBatchLimits(bounds.micro_batch_size, bounds.micro_batch_tokens)
    pair = ActorCriticPair(tiny.policy, critic, engines, sampling, passes, logits_bytes)
    ptx = PtxData(pairs, config.ptx.batch_size, 5, PAD) if config.ptx.weight else None
    return Learner(config, pair, tiny.reference, ptx)


def accumulate_gradients(
    learner: Learner, experience: Experience, kl_coef: float, sign: float
) -> dict[str, float]:
    """All backward passes of one step, and their metrics."""
    return totals_of_steps(
        [[s for task in gradient_tasks(learner, experience, kl_coef, sign) for s in task()]]
    )[0]


def collect(
    tiny: Tiny,
    config: PpoConfig,
    rows: Sequence[int] = range(8),
    *,
    streams: Sequence[int] | None = None,
    seed: int = 3,
    kl_coef: float | None = None,
    pair: ActorCriticPair | None = None,
) -> Experience:
    """A rollout of some prompts through all phases before the update."""
    pair = pair or make_learner(tiny, config).pair
    batch = PromptBatch(
        [tiny.prompts[row] for row in rows], rows if streams is None else streams, seed
    )
    replies = sample_replies(LocalSampler.of(pair.policy), 0, batch, pair.sampling)
    every = config.importance_sampling_correction.scored_every
    experience = score_rollout(pair, tiny.reference, replies, every=every)
    kl_coef = config.kl.coefficient if kl_coef is None else kl_coef
    rewards = tiny.reward_fn(experience.batch)
    moments = RunningMeanStd()
    moments.update(rewards)
    experience = with_rewards(experience, rewards, moments, kl_coef, config.rollout)
    experience = estimate_advantages(experience, config.advantage, config.replies_per_prompt)
    return with_fixed_reference(experience) if config.surrogate.fixed_reference else experience


def make_trainer(
    tiny: Tiny,
    config: PpoConfig,
    work: Path,
    *,
    rules: Sequence[Rule] = DEFAULT_RULES,
    measure: MeasurePolicy = first_weight,
    **changes: Any,
) -> Trainer:
    """A run with health rules, a selector by an arbitrary rule, and the reward model as its own
    referee.
    """
    limits = {"kl": 6.0, "max_new_tokens": float(config.max_new_tokens)}
    parts: dict[str, Any] = {
        "learner": make_learner(tiny, config),
        "reward_fn": tiny.reward_fn,
        "prompts": TrainingPrompts(
            [[Message("user", str(prompt))] for prompt in tiny.prompts], tiny.prompts
        ),
        "decode": lambda ids: " ".join(str(i) for i in ids if i != EOS),
        "moments": RunningMeanStd(),
        "context": RunContext(work),
        "selector": CheckpointSelector(measure, config.selection, work / "best"),
        "health": HealthGuard(HealthMonitor(limits, rules), config.health),
        "referee": reward_model_fn(tiny.reward),
    }
    return Trainer(**(parts | changes))


class Interrupting(Tracker):
    """Ends a run while it records a step."""

    def __init__(self, at: int) -> None:
        self.at = at

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if step == self.at:
            raise KeyboardInterrupt


def selection_of(trainer: Trainer) -> CheckpointSelector:
    """The trainer's selector."""
    assert trainer.selector is not None
    return trainer.selector


def health_of(trainer: Trainer) -> HealthGuard:
    """What applies the health rules to the trainer."""
    assert trainer.health is not None
    return trainer.health
