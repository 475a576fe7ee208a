"""One rollout batch with everything that updates need: the only thing that passes between the phases of PPO.

Shapes: B sequences, P prompt width (left-padded), T response width (right-padded).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from torch import Tensor

from rlhf_core.data.batching import epoch_order
from rlhf_core.sampling.token_scoring import Tokens


@dataclass(frozen=True)
class Experience:
    """All tensors share their first dimension. Masked positions of (B, T) tensors hold zeros and are never read."""

    tokens: Tensor  # (B, P+T)
    attention_mask: Tensor  # (B, P+T)
    response_mask: Tensor  # (B, T) bool: response tokens, the end marker included
    finished: Tensor  # (B,) bool: the reply ends with its end marker
    sampler_logprobs: Tensor  # (B, T) as the sampler saw them
    policy_logprobs: Tensor  # (B, T) by the trainer's forward pass, before any update
    old_logprobs: Tensor  # (B, T) of the behaviour policy in the ratio: the policy's, or the fixed reference's
    ref_logprobs: Tensor  # (B, T)
    full_kl: Tensor  # (B, T) exact KL(policy || reference) over the vocabulary
    entropy: Tensor  # (B, T)
    values: Tensor  # (B, T) of the state before each token
    scores: Tensor  # (B,) raw, from the reward model
    shaped_scores: Tensor  # (B,) transformed, clipped, shaped
    token_rewards: Tensor  # (B, T)
    advantages: Tensor  # (B, T) untreated
    returns: Tensor  # (B, T) lambda-returns, the critic's targets
    monte_carlo: Tensor  # (B, T) reward-to-go

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def batch(self) -> Tokens:
        """What models see of it."""
        return Tokens(self.tokens, self.attention_mask, self.response_mask)

    @property
    def lengths(self) -> Tensor:
        """Response tokens of each sequence (B,)."""
        return self.response_mask.sum(dim=1)

    def select(self, rows: Tensor | list[int]) -> Experience:
        """The given rows, in the given order; widths stay as they are."""
        return Experience(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    def minibatches(self, count: int, seed: int, epoch: int) -> Iterator[Experience]:
        """``count`` parts in an order that is a function of (seed, epoch) alone; sizes differ by at most one."""
        order = epoch_order(len(self), seed, epoch)
        for part in range(count):
            rows = order[part::count]
            if rows:
                yield self.select(rows)
