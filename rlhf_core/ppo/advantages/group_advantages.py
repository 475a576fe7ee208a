"""Advantages without a critic: the replies to one prompt are compared with each other.

The rows of a rollout are in groups: the replies to one prompt follow one another, on every rank, since every rank holds
the whole rollout. Shapes: B sequences, T response positions, P prompts, K replies to each (B = P * K).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlhf_core.config.ppo.advantage import AdvantageConfig
from rlhf_core.ppo.advantages.grpo import group_relative_advantages
from rlhf_core.ppo.advantages.rloo import leave_one_out_advantages
from rlhf_core.ppo.experience import Experience
from rlhf_core.ppo.losses.loss_reduction import sequence_sums
from rlhf_core.ppo.metrics import MetricRecord

EQUAL_REWARDS = 1e-6  # raw rewards within this are equal: identical replies may differ by rounding


def with_group_advantages(experience: Experience, config: AdvantageConfig, replies_per_prompt: int) -> Experience:
    """Add advantages to a rollout that has token rewards: one number for all tokens of a reply.

    Values, returns and Monte Carlo returns stay NaN.
    """
    groups = grouped_rewards(experience, replies_per_prompt)
    if config.estimator == "rloo":
        advantages = leave_one_out_advantages(groups)
    else:
        advantages = group_relative_advantages(groups, config.divide_by_std)
    per_token = advantages.view(-1, 1).expand_as(experience.token_rewards)
    return replace(experience, advantages=torch.where(experience.response_mask, per_token, torch.zeros_like(per_token)))


def grouped_rewards(experience: Experience, replies_per_prompt: int) -> Tensor:
    """What each reply is worth (P, K): its shaped reward, less its KL penalty where that is placed in the reward."""
    return sequence_sums(experience.token_rewards, experience.response_mask).view(-1, replies_per_prompt)


@dataclass(frozen=True)
class GroupMetrics(MetricRecord):
    """How far the replies to a prompt differ in reward, which is all that a critic-free update learns from.

    ``group_reward_std`` is the mean over prompts of the standard deviation of what their replies are worth,
    ``equal_reward_groups`` the share of prompts whose replies all have the same raw reward.
    """

    group_reward_std: float
    equal_reward_groups: float

    @staticmethod
    def of(experience: Experience, replies_per_prompt: int) -> GroupMetrics:
        """Measure a rollout of at least two replies to each prompt."""
        raw = experience.rewards.view(-1, replies_per_prompt)
        equal = raw.amax(dim=1) - raw.amin(dim=1) <= EQUAL_REWARDS
        spread = grouped_rewards(experience, replies_per_prompt).double().std(dim=1)
        return GroupMetrics(float(spread.mean()), float(equal.double().mean()))
