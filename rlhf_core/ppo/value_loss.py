"""The critic's objective and its share of an update (algorithms.md §6). Shapes: B sequences, T response positions.

It stands apart from the policy's objectives, so that a change to those leaves critic pre-training as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rlhf_core import distributed
from rlhf_core.ppo.experience import Experience
from rlhf_core.ppo.loss_reduction import Aggregation, StepSize, aggregate, masked_sum
from rlhf_core.sampling.token_scoring import TokenScorer, response_values, shared_micro_batches
from rlhf_core.training.engine import Engine


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """``max((V-R)^2, (clip(V, V_old-eps, V_old+eps)-R)^2) / 2``, unclipped with ``clip=None``: (B, T) -> (B, T)."""
    squared = (values - returns).square()
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        squared = torch.maximum(squared, (near - returns).square())
    return squared / 2


def value_clipped(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Where the clipped branch of the value loss is the larger one, so that it has no gradient: bool (B, T)."""
    near = old_values + (values - old_values).clamp(-clip, clip)
    return (near - returns).square() > (values - returns).square()


@dataclass(frozen=True)
class ValueSettings:
    """How the value loss is formed. ``weight`` matters where backbone or gradient norm is shared with the policy."""

    clip: float | None
    weight: float = 1.0
    aggregation: Aggregation = "token"
    micro_batch_size: int | None = None


def accumulate_value_gradient(
    engine: Engine, critic: TokenScorer, minibatch: Experience, settings: ValueSettings
) -> dict[str, float]:
    """Backward pass of the value loss over a minibatch, in micro-batches that never change the gradient.

    Returns ``value_loss`` (unweighted) and ``value_clip_fraction``.
    """
    size = StepSize.of(minibatch.response_mask)
    found = {"value_loss": 0.0, "value_clip_fraction": 0.0}
    for rows, counts in shared_micro_batches(minibatch.attention_mask, settings.micro_batch_size):
        values = engine.forward(partial(response_values, critic, minibatch.batch.part(rows)))
        engine.backward(counts * value_share(values, minibatch, rows, counts, size, settings, found))
    return distributed.reduce_metrics(found)


def value_share(
    values: Tensor,
    minibatch: Experience,
    rows: Tensor,
    counts: float,
    size: StepSize,
    settings: ValueSettings,
    found: dict[str, float],
) -> Tensor:
    """The weighted loss of one micro-batch, a scalar, from the values (b, t) of the given ``rows``.

    ``found`` takes in its share of ``value_loss`` (unweighted) and ``value_clip_fraction``, ``counts`` times.
    """
    width = values.shape[1]
    mask = minibatch.response_mask[rows, :width]
    old, returns = minibatch.values[rows, :width], minibatch.returns[rows, :width]
    loss = aggregate(value_loss(values, old, returns, settings.clip), mask, size, settings.aggregation)
    found["value_loss"] += counts * float(loss.detach())
    if settings.clip is not None:
        hit = value_clipped(values.detach(), old, returns, settings.clip)
        found["value_clip_fraction"] += counts * float(masked_sum(hit.float(), mask)) / size.tokens
    return settings.weight * loss
