"""What a head reads of a reply besides its last state: the mean over the reply, or over the part written so far.

Shapes: B sequences, L positions, H hidden. The masks are 1 at the reply's positions (B, L).
"""

from __future__ import annotations

import torch
from torch import Tensor

# States of zero that the mean so far begins with: few tokens tell little of the whole reply, and their mean spreads far
# more than the one that it foretells. With 10, the head of a reward model for SmolLM2-135M explains .63 of the variance
# of its own scores along the reply; with 1 it explains .46, with 96 .42.
PRIOR_TOKENS = 10


def mean_over_reply(hidden: Tensor, reply_mask: Tensor) -> Tensor:
    """The mean state of each row's reply in float32: (B, L, H), (B, L) -> (B, H)."""
    weights = reply_mask / reply_mask.sum(dim=1, keepdim=True).clamp(min=1)
    return torch.einsum("bl,blh->bh", weights.to(torch.float32), hidden.float())


def mean_so_far(hidden: Tensor, reply_mask: Tensor) -> Tensor:
    """The mean over the states from before the reply up to each position, in float32: (B, L, H), (B, L) -> (B, L, H).

    With the states :math:`h_0` before the reply and :math:`h_1, ..., h_t` of its first ``t`` tokens, it is
    :math:`(h_0 + ... + h_t) / (t + m)` for :math:`m` = ``PRIOR_TOKENS``. Positions further ahead are zero.
    """
    mask = reply_mask.float()
    from_before = torch.maximum(mask, torch.nn.functional.pad(mask[:, 1:], (0, 1)))
    total = (hidden.float() * from_before.unsqueeze(-1)).cumsum(dim=1)
    return total / (from_before.cumsum(dim=1) - 1 + PRIOR_TOKENS).unsqueeze(-1)
