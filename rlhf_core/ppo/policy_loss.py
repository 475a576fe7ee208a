"""Per-token policy objectives (algorithms.md §6). Shapes: B sequences, T response positions.

Every function returns terms to be *minimised*, before aggregation; masks are applied by ``aggregation.aggregate``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_core.config.ppo import SurrogateConfig


def ratios(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """``rho = exp(log pi - log pi_old)`` at response tokens, 1 elsewhere: (B, T) -> (B, T).

    Masked differences are zeroed before the exponential, so padding can neither overflow nor poison a gradient.
    """
    return torch.where(mask, logprobs - old_logprobs, torch.zeros_like(logprobs)).exp()


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip: float | None, dual_clip: float | None = None) -> Tensor:
    """``-min(rho A, clip(rho, 1-eps, 1+eps) A)``: (B, T) -> (B, T). Source: Schulman et al. 2017, equation 7.

    ``clip=None`` is the unclipped surrogate. ``dual_clip`` c > 1 bounds it where A < 0: ``-max(min(..), c A)`` (Ye et
    al. 2020, equation 5).
    """
    objective = ratio * advantages
    if clip is not None:
        objective = torch.minimum(objective, ratio.clamp(1 - clip, 1 + clip) * advantages)
    if dual_clip is not None:
        bounded = torch.maximum(objective, dual_clip * advantages)
        objective = torch.where(advantages < 0, bounded, objective)
    return -objective


def penalty_surrogate(ratio: Tensor, advantages: Tensor, weight: float) -> Tensor:
    """PPO-penalty: ``-rho A + weight * KL(pi_old || pi)``: (B, T) -> (B, T). Source: paper, equation 11.

    The tokens come from pi_old, so ``rho - 1 - log rho`` is an unbiased estimate of that KL, and so is its gradient.
    """
    return -ratio * advantages + weight * old_policy_kl(ratio)


def old_policy_kl(ratio: Tensor) -> Tensor:
    """Never-negative estimate of KL(pi_old || pi) per token, ``rho - 1 - log rho``: (B, T) -> (B, T)."""
    return ratio - 1 - ratio.log()


def surrogate(ratio: Tensor, advantages: Tensor, config: SurrogateConfig) -> Tensor:
    """The policy objective that ``config`` names: (B, T) -> (B, T)."""
    if config.kind == "penalty":
        return penalty_surrogate(ratio, advantages, config.penalty)
    return clipped_surrogate(ratio, advantages, config.clip, config.dual_clip)


def clip_fraction_mask(ratio: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """Where the clip takes the gradient away (the clipped branch is the smaller one): (B, T) -> bool (B, T)."""
    return ((ratio > 1 + clip) & (advantages > 0)) | ((ratio < 1 - clip) & (advantages < 0))
