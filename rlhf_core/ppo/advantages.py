"""Advantage normalisation and advantage clip (algorithms.md §5; paper, section 5.3.1).

Both are off in PPO-max, which constrains rewards instead. Shapes: B sequences, T response positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_core.config.ppo import AdvantageConfig
from rlhf_core.ppo.loss_reduction import masked_mean


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
