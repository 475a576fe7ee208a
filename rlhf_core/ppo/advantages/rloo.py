"""REINFORCE leave-one-out (RLOO): the other replies to a prompt are the baseline of each reply.

Sources: Ahmadian et al. 2024, "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback
in LLMs"; the estimator is that of Kool et al. 2019. Shapes: P prompts, K replies to each.
"""

from __future__ import annotations

from torch import Tensor


def leave_one_out_advantages(rewards: Tensor) -> Tensor:
    """``A_i = R_i - mean of R_j over j != i``: (P, K) -> (P, K).

    The baseline of a reply is independent of it, so that the policy gradient stays unbiased.
    """
    replies = rewards.shape[1]
    baseline = (rewards.sum(dim=1, keepdim=True) - rewards) / (replies - 1)
    return rewards - baseline
