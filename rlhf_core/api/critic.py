"""Critic pre-training: values of a frozen policy's replies, before PPO moves the policy."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.api.inputs import checked_tokenizer, require_type, rows_of
from rlhf_core.api.reward_function import RewardFunction, reward_fn_of
from rlhf_core.api.reward_model import TrainedRewardModel
from rlhf_core.api.run_folder import run_context
from rlhf_core.config.model import OptimizerConfig
from rlhf_core.config.ppo.reward_sources import DEFAULT_SOURCES
from rlhf_core.config.stages.critic import CriticConfig
from rlhf_core.config.stages.ppo import RolloutConfig
from rlhf_core.data.schema import Prompt
from rlhf_core.errors import ConfigError
from rlhf_core.models.adapters.lora import merge_adapters
from rlhf_core.models.float32_head import float32_unembedding
from rlhf_core.models.heads.scalar import ScalarModel
from rlhf_core.ppo.critic_pretraining import CriticTrainer
from rlhf_core.ppo.learners.actor_critic_pair import SeparateActorCritic
from rlhf_core.ppo.rewards.reward_normalization import RunningMeanStd
from rlhf_core.ppo.rollouts.prompts import TrainingPrompts
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.training.engine.factory import build_engine, finish
from rlhf_core.training.rng import derive_seed, seed_everything
from rlhf_core.training.run_context import RunContext

DEFAULT_LR = 1e-5


@dataclass(frozen=True)
class TrainedCritic:
    """A value function in the units of PPO's returns.

    Attributes:
        model: Gives a value at every position.
        moments: Running moments of the raw rewards, by which PPO goes on normalising them.
        rollout: The settings that those units depend on; PPO must use the same.
        metrics: Rollouts made, explained variance, moments.
        history: One record per rollout.
    """

    model: ScalarModel
    moments: RunningMeanStd
    rollout: RolloutConfig
    metrics: dict[str, float]
    history: list[dict[str, Any]]


def train_critic(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Iterable[Prompt | Mapping[str, Any] | str],
    reward: RewardFunction | ScalarModel | TrainedRewardModel,
    *,
    rollout: RolloutConfig | None = None,
    init: ScalarModel | TrainedRewardModel | None = None,
    config: CriticConfig | None = None,
    context: RunContext | None = None,
) -> TrainedCritic:
    """Pre-train a critic on replies of the frozen ``policy`` (algorithms.md §3; paper, section 5.3.3).

    Args:
        policy: The model that PPO will start from. It is left as it is.
        tokenizer: Its tokenizer.
        prompts: Strings, or records such as ``{"prompt": ...}``; see docs/data-formats.md.
        reward: ``f(prompts, replies)`` with one number per reply, or a reward model of the same tokenizer.
        rollout: ``PpoConfig(...).rollout`` of the PPO run to come; by default that of a default one.
        init: A scalar model to start from, such as the reward model; by default the policy with a random head.
        config: Settings; by default with a learning rate of 1e-5. Its ``init`` is not read.
        context: Where to report and to keep partial state; by default nowhere.

    Raises:
        ConfigError: ``rollout`` asks for a critic on the policy's own backbone, or for none.
        DataError: A prompt leaves no room for a reply, or the reward function breaks its contract.
        TrainingPaused: Three steps in a row were not finite.
    """
    rollout = rollout or RolloutConfig()
    refuse_pipeline_settings(rollout)
    if rollout.advantage.critic_free:
        raise ConfigError(f"advantage.estimator {rollout.advantage.estimator} needs no critic: call train_ppo without")
    require_type(config, CriticConfig, "config")
    score = reward.model if isinstance(reward, TrainedRewardModel) else reward
    start = init.model if isinstance(init, TrainedRewardModel) else init
    config = config or CriticConfig(optimizer=OptimizerConfig(lr=DEFAULT_LR, schedule="constant", warmup=0.0))
    seed_everything(config.seed)
    tokenizer = checked_tokenizer(tokenizer, policy)
    encoded = encode_prompts(prompts, tokenizer, policy, rollout.max_new_tokens)
    reward_fn = reward_fn_of(score, encoded, tokenizer, rollout.micro_batch_size, rollout.micro_batch_tokens)
    critic = _initial_critic(policy, start, config)
    steps = max(config.max_rollouts, 1) * config.epochs * config.minibatches
    with (
        evaluating(policy),
        run_context(context, "train_critic", config, rollout, encoded, reward, policy, critic) as run,
    ):
        engine = build_engine(critic, config.optimizer, steps, "critic", run)
        sampling = Sampling.for_rollouts(tokenizer, rollout)
        limits = rollout.micro_batch_size, run.launch.logits_bytes, rollout.micro_batch_tokens
        pair = SeparateActorCritic(policy, critic, {"critic": engine}, sampling, *limits)
        trainer = CriticTrainer(config, rollout, pair, reward_fn, encoded, run)
        metrics = trainer.run()
        history = trainer.history.rows()
    critic = finish(engine, critic)
    if config.lora is not None:
        merge_adapters(critic)
    return TrainedCritic(critic, trainer.moments, rollout, metrics, history)


def refuse_pipeline_settings(rollout: RolloutConfig) -> None:
    """Refuse settings that only the pipeline's stages read.

    Raises:
        ConfigError: One of them is set.
    """
    if rollout.critic_mode != "separate":
        raise ConfigError("critic_mode shared is for the pipeline's stages; leave it at separate here")
    if rollout.reward.sources != DEFAULT_SOURCES:
        raise ConfigError("reward.sources is for the pipeline's stages; give the reward as an argument here")


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Put a given model in evaluation mode inside the block, with its logits computed in float32."""
    training = model.training
    model.eval()
    try:
        with float32_unembedding(model):
            yield
    finally:
        model.train(training)


def encode_prompts(
    prompts: Iterable[Prompt | Mapping[str, Any] | str],
    tokenizer: PreTrainedTokenizerBase,
    policy: PreTrainedModel,
    max_new_tokens: int,
) -> TrainingPrompts:
    """Read and encode prompts, and check that prompt and reply fit the policy's positions."""
    encoded = TrainingPrompts.encode(tokenizer, [row.prompt for row in rows_of(Prompt, prompts, "prompts")])
    encoded.require_room(max_new_tokens, getattr(policy.config, "max_position_embeddings", None))
    return encoded


def _initial_critic(policy: PreTrainedModel, init: ScalarModel | None, config: CriticConfig) -> ScalarModel:
    seed = derive_seed(config.seed, "critic", "head")
    critic = copy.deepcopy(init) if init is not None else ScalarModel.from_causal_lm(policy, seed)
    critic.unembedding = None
    critic.requires_grad_(True)
    if config.lora is not None:
        critic.add_adapters(config.lora, derive_seed(config.seed, "critic", "lora"))
    return critic
