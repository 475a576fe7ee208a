"""What PPO and critic pre-training are rewarded by: a Python function, or a reward model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf_core.errors import ConfigError
from rlhf_core.models.heads.scalar import ScalarModel
from rlhf_core.ppo.reward_sources.mixture import RewardMixture, WeightedSource
from rlhf_core.ppo.reward_sources.python_function import PythonFunction
from rlhf_core.ppo.reward_sources.rank_shared import RankShared
from rlhf_core.ppo.reward_sources.source import PromptReader
from rlhf_core.ppo.rewards.token_rewards import RewardFn, reward_model_fn
from rlhf_core.ppo.rollouts.prompts import TrainingPrompts

# (prompts, replies) -> one number per reply; a prompt is its turns as {"role": ..., "content": ...}.
RewardFunction = Callable[[list[list[dict[str, str]]], list[str]], Sequence[float] | Any]


def reward_fn_of(
    reward: RewardFunction | ScalarModel,
    prompts: TrainingPrompts,
    tokenizer: PreTrainedTokenizerBase,
    micro_batch_size: int | None,
    micro_batch_tokens: int | None = None,
) -> RewardFn:
    """Make the reward function that the trainers call on tokens."""
    if isinstance(reward, ScalarModel):
        return reward_model_fn(reward.eval(), micro_batch_size, micro_batch_tokens)
    if not callable(reward):
        raise ConfigError(f"reward is a {type(reward).__name__}; give a function f(prompts, replies) or a reward model")
    function = PythonFunction(reward, f"the reward function {getattr(reward, '__name__', '')}".rstrip())
    source = WeightedSource("function", 1.0, RankShared(function))
    return RewardMixture([source], PromptReader(prompts), tokenizer)
