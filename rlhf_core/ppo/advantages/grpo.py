"""Group relative advantages (GRPO): rewards standardised among the replies to one prompt.

Sources: Shao et al. 2024, "DeepSeekMath", section 4.1; without the division Liu et al. 2025, "Understanding
R1-Zero-Like Training" (Dr. GRPO). Shapes: P prompts, K replies to each.
"""

from __future__ import annotations

from torch import Tensor

STD_EPSILON = 1e-4  # keeps rounding between equal rewards from becoming an advantage


def group_relative_advantages(rewards: Tensor, divide_by_std: bool) -> Tensor:
    """``A_i = (R_i - mean R) / (std R + 1e-4)``, or without the division ``R_i - mean R``: (P, K) -> (P, K).

    The standard deviation is the sample's (over K - 1). Dividing by it gives prompts with little difference between
    their replies, very easy or very hard ones, as much weight as the others.
    """
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    return centred / (rewards.std(dim=1, keepdim=True) + STD_EPSILON) if divide_by_std else centred
