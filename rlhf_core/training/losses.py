"""Losses of supervised fine-tuning and of the reward model (algorithms.md §1 and 2).

Each divides by the ``total`` of the whole optimiser step, so that the losses of its micro-batches
add up to the loss of the full batch. Shapes: N tokens, V vocabulary, B pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rlhf_core.models.forward import LOGITS_BYTES, LazyLogits, compute_in_chunks


@dataclass(frozen=True)
class StepTotals:
    """What one optimiser step holds over all micro-batches and ranks: the divisors of its losses.

    Attributes:
        rows: Pairs of the reward model, replies of PPO.
        tokens: Tokens of chosen replies, or of all replies.
    """

    rows: int
    tokens: int


def token_cross_entropy(logits: Tensor, targets: Tensor, total: int) -> Tensor:
    """Cross-entropy in nats summed over N tokens, divided by ``total`` tokens: (N, V), (N,) -> ().

    Supervised fine-tuning's loss, and the reward model's imitation term on the preferred reply
    (weight beta_rm).
    """
    return functional.cross_entropy(logits.float(), targets, reduction="sum") / total


def chunked_cross_entropy(
    logits: LazyLogits, targets: Tensor, total: int, limit: int = LOGITS_BYTES
) -> Tensor:
    """Compute :func:`token_cross_entropy` in chunks of positions: (N, V), (N,) -> ().

    At most ``limit`` bytes of float32 logits exist at a time.
    """
    if logits.chunks(limit) == 1:
        return token_cross_entropy(logits.whole(), targets, total)
    return -chunked_token_logprobs(logits, targets, limit).sum() / total


def chunked_token_logprobs(
    logits: LazyLogits, targets: Tensor, limit: int = LOGITS_BYTES
) -> Tensor:
    """Log-probability of each target, ``limit`` bytes of float32 logits at a time.

    Shapes: (N, V), (N,) -> (N,).
    """
    count = logits.chunks(limit)
    head = logits.head if count == 1 else logits.repeatable_head()

    def compute(states: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        return (-functional.cross_entropy(head(states).float(), targets, reduction="none"),)

    columns = (logits.states, targets)
    return (compute(*columns) if count == 1 else compute_in_chunks(compute, columns, count))[0]


def pairwise_loss(chosen: Tensor, rejected: Tensor, margin: Tensor | None, total: int) -> Tensor:
    """``-logsigmoid(r_w - r_l - margin)`` summed over pairs, divided by ``total`` pairs.

    Shapes: (B,) three times -> ().
    """
    difference = chosen - rejected
    if margin is not None:
        difference = difference - margin
    return -functional.logsigmoid(difference).sum() / total


def ranked_right(margins: Tensor) -> Tensor:
    """Return 1 where the preferred reply is ahead, 0 where it is behind.

    An exact tie counts half. Shapes: (B,) -> (B,).
    """
    return torch.heaviside(margins, margins.new_tensor(0.5))


def centering_loss(chosen: Tensor, rejected: Tensor, total: int) -> Tensor:
    """``(r_w + r_l)^2`` summed over pairs, divided by ``total``.

    It keeps rewards near zero and margins unchanged.
    """
    return (chosen + rejected).square().sum() / total
