"""Reward scaling (paper, section 5.3.1): divide by the standard deviation and leave the mean where it is.

The trick comes from continuous control, where the rolling discounted sum of rewards is scaled (Engstrom et al. 2020).
With one reward at the end of a reply and no discount that sum is the reward itself.
"""

from __future__ import annotations

from torch import Tensor


def scale_rewards(rewards: Tensor, std: float) -> Tensor:
    """``r / std`` with the running standard deviation of raw rewards: (B,) -> (B,)."""
    return rewards / std
