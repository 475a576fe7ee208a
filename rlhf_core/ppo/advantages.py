"""Advantages and returns (algorithms.md §5). Shapes: B sequences, T response positions, right-padded."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_core.config.ppo import AdvantageConfig
from rlhf_core.ppo.loss_reduction import masked_mean


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016): (B, T) three times -> advantages, returns, both (B, T).

    ``delta_t = R_t + gamma * V_{t+1} - V_t`` with V past the end 0, ``A_t = delta_t + gamma * lam * A_{t+1}``,
    ``returns = A + V`` with A as it is here, unnormalised. Masked positions never leak in; they come out as 0.
    """
    zeros = torch.zeros_like(values)
    values, rewards = torch.where(mask, values, zeros), torch.where(mask, rewards, zeros)
    advantages = torch.zeros_like(values)
    following_value, following_advantage = zeros[:, 0], zeros[:, 0]
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * following_value - values[:, t]
        # Past the end every term is zero, so no mask is needed inside the recursion.
        following_advantage = delta + gamma * lam * following_advantage
        advantages[:, t] = following_advantage
        following_value = values[:, t]
    return advantages, advantages + values


def monte_carlo_returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Discounted reward-to-go, free of any critic: (B, T) -> (B, T). What explained variance is measured against."""
    return gae(rewards, torch.zeros_like(rewards), mask, gamma, 1.0)[1]


def masked_whiten(values: Tensor, mask: Tensor) -> Tensor:
    """``(x - mean) / sqrt(population variance + 1e-8)`` over response tokens only: (B, T) -> (B, T).

    The mean stays removed, and padding takes no part; masked positions come out as 0.
    """
    mean = masked_mean(values, mask)
    variance = masked_mean((values - mean).square(), mask)
    return torch.where(mask, (values - mean) * torch.rsqrt(variance + 1e-8), torch.zeros_like(values))


def normalize_and_clip_advantages(advantages: Tensor, mask: Tensor, config: AdvantageConfig) -> Tensor:
    """Normalise over the minibatch, then clip to +-``clip``; each is a switch of its own: (B, T) -> (B, T)."""
    if config.normalize:
        advantages = masked_whiten(advantages, mask)
    if config.clip is not None:
        advantages = advantages.clamp(-config.clip, config.clip)
    return advantages


def explained_variance(values: Tensor, targets: Tensor, mask: Tensor) -> float:
    """``1 - Var(targets - values) / Var(targets)`` over response tokens; 0 where the targets do not vary."""
    values, targets = values[mask].double(), targets[mask].double()
    if targets.numel() < 2:
        return 0.0
    spread = float(targets.var(unbiased=False))
    return 1.0 - float((targets - values).var(unbiased=False)) / spread if spread > 1e-12 else 0.0
