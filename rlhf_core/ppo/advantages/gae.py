"""Generalised advantage estimation and returns (algorithms.md §5). Shapes: B sequences, T response positions."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rlhf_core.config.ppo.advantage import AdvantageConfig
from rlhf_core.ppo.experience import Experience


def with_advantages(experience: Experience, config: AdvantageConfig) -> Experience:
    """Add advantages, the critic's targets and Monte Carlo returns to a rollout that has token rewards."""
    rewards, mask = experience.token_rewards, experience.response_mask
    advantages, returns = gae(rewards, experience.values, mask, config.gamma, config.lam)
    monte_carlo = monte_carlo_returns(rewards, mask, config.gamma)
    return replace(experience, advantages=advantages, returns=returns, monte_carlo_returns=monte_carlo)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Estimate advantages (Schulman et al. 2016): (B, T) three times -> advantages, returns, both (B, T).

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
    """Discounted reward-to-go, free of any critic: (B, T) -> (B, T). Explained variance is measured against it."""
    return gae(rewards, torch.zeros_like(rewards), mask, gamma, 1.0)[1]


def explained_variance(values: Tensor, targets: Tensor, mask: Tensor) -> float:
    """``1 - Var(targets - values) / Var(targets)`` over response tokens; 0 where the targets do not vary."""
    values, targets = values[mask].double(), targets[mask].double()
    if targets.numel() < 2:
        return 0.0
    spread = float(targets.var(unbiased=False))
    return 1.0 - float((targets - values).var(unbiased=False)) / spread if spread > 1e-12 else 0.0
