"""Importance sampling: the ratio to the behaviour policy, and the fixed reference of the paper (section 5.3.2).

The behaviour policy is the one that sampled. The paper's ablation takes the reference (SFT) in its place, as if the
buffer were infinitely old. The replies are still the current policy's own, so nothing is corrected for old samples:
together with the ratio's clip it is a trust region at SFT. Shapes: B sequences, T response positions.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rlhf_core.ppo.experience import Experience
from rlhf_core.ppo.losses.loss_reduction import masked_mean


def ratios(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """``rho = exp(log pi - log pi_old)`` at response tokens, 1 elsewhere: (B, T) -> (B, T).

    Masked differences are zeroed before the exponential, so padding can neither overflow nor poison a gradient.
    """
    return torch.where(mask, logprobs - old_logprobs, torch.zeros_like(logprobs)).exp()


def with_fixed_reference(experience: Experience) -> Experience:
    """Take the ratio to the reference in place of the policy that sampled (``ppo.surrogate.fixed_reference``)."""
    return replace(experience, old_logprobs=experience.ref_logprobs)


def initial_ratio(experience: Experience) -> float:
    """Mean ratio before any step: 1 up to rounding, except with the fixed reference."""
    ratio = ratios(experience.policy_logprobs, experience.old_logprobs, experience.response_mask)
    return float(masked_mean(ratio, experience.response_mask))
