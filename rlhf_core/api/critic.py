"""Critic pre-training: values of a frozen policy's replies, before PPO moves the policy."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.api.inputs import (
    RewardFunction,
    checked_tokenizer,
    encode_prompts,
    evaluating,
    require_type,
    reward_fn_of,
    reward_inputs,
    run_context,
    with_safe_rates,
)
from rlhf_core.api.reward_model import TrainedRewardModel
from rlhf_core.config.policy import CriticConfig
from rlhf_core.config.ppo import RolloutConfig
from rlhf_core.data.schema import Prompt
from rlhf_core.errors import ConfigError
from rlhf_core.models.adapters import merge_adapters
from rlhf_core.models.causal_lm import load_policy
from rlhf_core.models.given import require_plain
from rlhf_core.models.heads import ScalarModel
from rlhf_core.models.precision import plain_arithmetic
from rlhf_core.models.shared_base import SETTINGS, TENSORS, Adapters, adapters_of
from rlhf_core.ppo.actor_critic import ActorCriticPair
from rlhf_core.ppo.critic_pretraining import CriticTrainer
from rlhf_core.ppo.rewards import RunningMeanStd
from rlhf_core.ppo.rollout import TrainingPrompts
from rlhf_core.sampling.agreement import require_replies_as_scored
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.sampling.sampler import opened_sampler
from rlhf_core.sampling.token_scoring import MicroBatchLimits
from rlhf_core.training.engine.factory import build_engine, device_before, finish
from rlhf_core.training.engine.frozen import FrozenModels
from rlhf_core.training.loop import Unfinished, keeping_what_was_made
from rlhf_core.training.rng import derive_seed, seed_everything
from rlhf_core.training.run_context import RunContext

MOMENTS = "reward_moments.json"


@dataclass(frozen=True)
class TrainedCritic:
    """A value function in the units of PPO's returns.

    Attributes:
        model: Gives a value at every position.
        tokenizer: The policy's.
        moments: Running moments of the raw rewards, by which PPO goes on normalising them.
        rollout: The settings that those units depend on; PPO must use the same.
        metrics: Rollouts made, explained variance, moments.
        history: One record per rollout.
        adapters: What was trained, where that were adapters on the weights of a folder.
    """

    model: ScalarModel
    tokenizer: PreTrainedTokenizerBase
    moments: RunningMeanStd
    rollout: RolloutConfig
    metrics: dict[str, float]
    history: list[dict[str, Any]]
    adapters: Adapters | None = None

    def save(self, path: str | Path) -> None:
        """Save it with the moments as a folder that ``train_ppo`` takes as critic."""
        files: dict[str, Any] = {MOMENTS: self.moments.to_dict()}
        tensors = {}
        if self.adapters is not None:
            files[SETTINGS], tensors[TENSORS] = self.adapters.settings(), self.adapters.tensors
        self.model.save(Path(path), self.tokenizer, files, tensors)


@plain_arithmetic()
def train_critic(
    policy: PreTrainedModel | Path,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Iterable[Prompt | Mapping[str, Any] | str] | TrainingPrompts,
    reward: RewardFunction | ScalarModel | TrainedRewardModel | Path | None = None,
    *,
    rollout: RolloutConfig | None = None,
    init: ScalarModel | TrainedRewardModel | Path | None = None,
    config: CriticConfig | None = None,
    context: RunContext | None = None,
    allow_high_learning_rates: bool = False,
) -> TrainedCritic:
    """Pre-train a critic on replies of the frozen ``policy``.

    See algorithms.md §3, and section 5.3.3 of the paper. With ``rollout.critic_mode: shared`` only
    a value head is trained, on the frozen policy, whatever ``init`` is.

    Args:
        policy: The model that PPO will start from, or its folder. It is left as it is.
        tokenizer: Its tokenizer.
        prompts: Strings, or records such as ``{"prompt": ...}``; see docs/data-formats.md.
        reward: As in :func:`~rlhf_core.api.ppo.train_ppo`; None and a folder take
            ``rollout.reward.sources``.
        rollout: ``PpoConfig(...).rollout`` of the PPO run to come; by default that of a default
            one.
        init: A scalar model to start from, such as the reward model, or its folder; by default the
            policy with a random head.
        config: Settings. A learning rate that is left out is one that suits the policy. Its
            ``init`` is not read.
        context: Where to report and to keep partial state; by default nowhere.
        allow_high_learning_rates: Allows a pretrained model rates that usually wreck it.

    Raises:
        ConfigError: ``rollout`` asks for no critic or gives the reward twice, or a learning rate is
            far beyond what suits a pretrained model.
        DataError: A prompt leaves no room for a reply, or the reward function breaks its contract.
        TrainingPaused: Three steps in a row were not finite.
    """
    require_type(rollout, RolloutConfig, "rollout")
    rollout = rollout or RolloutConfig()
    if rollout.advantage.critic_free:
        raise ConfigError(
            f"advantage.estimator {rollout.advantage.estimator} needs no critic: call train_ppo without"
        )
    require_type(config, CriticConfig, "config")
    score = reward.model if isinstance(reward, TrainedRewardModel) else reward
    start = init.model if isinstance(init, TrainedRewardModel) else init
    require_plain(policy, "policy")
    require_plain(start, "init")
    require_plain(score if isinstance(score, nn.Module) else None, "reward")
    # A new head on a frozen backbone takes any rate.
    insisted = allow_high_learning_rates or rollout.critic_mode == "shared"
    config = with_safe_rates(config or CriticConfig(), policy, insisted)
    seed_everything(config.seed)
    tokenizer = checked_tokenizer(tokenizer, policy)
    encoded = encode_prompts(prompts, tokenizer, policy, rollout.max_new_tokens)
    identity = {
        "config": config,
        "rollout": rollout,
        "prompts": encoded,
        "policy": policy,
        "init": start,
    }
    identity |= reward_inputs(score, rollout, context)
    with evaluating(policy, score), run_context(context, "train_critic", identity) as run:
        frozen, whole = FrozenModels(run.launch), rollout.sampler.kind == "local"
        if isinstance(policy, Path):
            frozen_policy, _ = load_policy(policy, device=None if whole else frozen.loading)
            frozen_policy.requires_grad_(False)
            if not whole:
                frozen_policy = frozen.place(frozen_policy)
        else:
            require_replies_as_scored(policy, "policy")
            frozen_policy = policy
        device = device_before(run.launch, config.lora)
        critic = initial_critic(policy, start, config, rollout, device)
        reward_fn = reward_fn_of(score, rollout, encoded, tokenizer, frozen, run)
        steps = max(config.max_rollouts, 1) * config.epochs * config.minibatches
        engine = build_engine(critic, config.optimizer, steps, "critic", run)
        sampling = Sampling.for_rollouts(tokenizer, rollout)
        limits = MicroBatchLimits(rollout.micro_batch_size, rollout.micro_batch_tokens)
        engines, logits = {"critic": engine}, run.launch.logits_bytes
        pair = ActorCriticPair(frozen_policy, critic, engines, sampling, limits, logits, whole)
        with opened_sampler(rollout.sampler, run.work, run.folder) as sampler:
            trainer = CriticTrainer(
                config, rollout, pair, reward_fn, encoded, run, frozen=frozen, sampler=sampler
            )
            with keeping_what_was_made(run, lambda: Unfinished(critic, trainer.history.rows())):
                trainer.run()
        history = trainer.history.rows()
    critic = finish(engine, critic)
    adapters = None
    if config.lora is not None:
        on = policy if start is None or rollout.critic_mode == "shared" else start
        if isinstance(on, Path):
            adapters = adapters_of(critic, config.lora, on)
        merge_adapters(critic)
    return TrainedCritic(
        critic, tokenizer, trainer.moments, rollout, trainer.summary(), history, adapters
    )


def initial_critic(
    policy: PreTrainedModel | Path,
    init: ScalarModel | Path | None,
    config: CriticConfig,
    rollout: RolloutConfig,
    device: torch.device | None = None,
) -> ScalarModel:
    """Return the critic before pre-training, without the unembedding that a reward model keeps.

    With a shared backbone it is the policy with a head of zeros, and only the head can be trained.
    """
    shared = rollout.critic_mode == "shared"
    if init is None or shared:
        seed = derive_seed(config.seed, "critic", "head")
        critic = ScalarModel.from_causal_lm(policy, seed, device=device)
    elif isinstance(init, Path):
        critic = ScalarModel.load(init, device=device)
    else:
        critic = copy.deepcopy(init)
    critic.unembedding = None
    # PPO's policy will be a shared backbone, so that it must stay what SFT made of it.
    critic.requires_grad_(not shared)
    if shared:
        # The head starts at zero: a random one explains less than nothing, and no backbone adapts
        # to it.
        head = critic.model.get_submodule("score").requires_grad_(True)
        nn.init.zeros_(head.get_parameter("weight"))
    if config.lora is not None:
        critic.add_adapters(config.lora, derive_seed(config.seed, "critic", "lora"))
    return critic
