"""Advantages of a rollout by the estimator in use, their normalisation and their clip (algorithms.md §5).

Normalisation and clip are off in PPO-max, which constrains rewards instead (paper, section 5.3.1). Shapes: B sequences,
T response positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_core.config.ppo.advantage import AdvantageConfig
from rlhf_core.ppo.advantages.gae import with_advantages
from rlhf_core.ppo.advantages.group_advantages import with_group_advantages
from rlhf_core.ppo.experience import Experience
from rlhf_core.ppo.losses.loss_reduction import masked_mean


def estimate_advantages(experience: Experience, config: AdvantageConfig, replies_per_prompt: int) -> Experience:
    """Add advantages to a rollout that has token rewards, and with GAE the critic's targets."""
    if config.critic_free:
        return with_group_advantages(experience, config, replies_per_prompt)
    return with_advantages(experience, config)


def normalize_and_clip_advantages(advantages: Tensor, mask: Tensor, config: AdvantageConfig) -> Tensor:
    """Normalise over the minibatch, then clip to +-``clip``; each is a switch of its own: (B, T) -> (B, T)."""
    if config.normalize:
        advantages = masked_whiten(advantages, mask)
    if config.clip is not None:
        advantages = advantages.clamp(-config.clip, config.clip)
    return advantages


def masked_whiten(values: Tensor, mask: Tensor) -> Tensor:
    """``(x - mean) / sqrt(population variance + 1e-8)`` over response tokens only: (B, T) -> (B, T).

    The mean stays removed, and padding takes no part; masked positions come out as 0.
    """
    mean = masked_mean(values, mask)
    variance = masked_mean((values - mean).square(), mask)
    return torch.where(mask, (values - mean) * torch.rsqrt(variance + 1e-8), torch.zeros_like(values))
