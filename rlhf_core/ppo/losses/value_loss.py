"""The critic's loss with value clip (algorithms.md §6). Shapes: B sequences, T response positions.

It stands apart from the policy's loss, so that a change to that leaves critic pre-training as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_core.ppo.experience import Experience
from rlhf_core.ppo.losses.loss_reduction import Aggregation, StepSize, aggregate, masked_sum
from rlhf_core.ppo.metrics import MetricRecord
from rlhf_core.training.device_scalars import Scalar, device_scalar


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """``max((V-R)^2, (clip(V, V_old-eps, V_old+eps)-R)^2) / 2``, unclipped with ``clip=None``: (B, T) -> (B, T)."""
    squared = (values - returns).square()
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        squared = torch.maximum(squared, (near - returns).square())
    return squared / 2


def value_clip_mask(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Where the clipped branch of the value loss is the larger one, so that it has no gradient: bool (B, T)."""
    near = old_values + (values - old_values).clamp(-clip, clip)
    return (near - returns).square() > (values - returns).square()


@dataclass(frozen=True)
class ValueMetrics(MetricRecord):
    """The critic's loss on one minibatch, without its weight, and the share of tokens where the clip binds."""

    value_loss: Scalar
    value_clip_fraction: Scalar


@dataclass(frozen=True)
class ValueObjective:
    """The critic's loss in one optimiser step.

    Attributes:
        clip: Half-width of the value clip; None for no clip.
        weight: Weight of the loss; it matters where backbone or gradient norm is shared with the policy.
        aggregation: How per-token terms become one number.
    """

    clip: float | None
    weight: float = 1.0
    aggregation: Aggregation = "token"

    def loss(self, outputs: Tensor, batch: Experience, size: StepSize) -> tuple[Tensor, ValueMetrics]:
        """The weighted share of one micro-batch, a scalar, from the current critic's values (b, t)."""
        mask, old, returns = batch.response_mask, batch.values, batch.returns
        loss = aggregate(value_loss(outputs, old, returns, self.clip), mask, size, self.aggregation)
        clip_fraction: Scalar = 0.0
        if self.clip is not None:
            clipped = value_clip_mask(outputs.detach(), old, returns, self.clip)
            clip_fraction = device_scalar(masked_sum(clipped.float(), mask)) / size.tokens
        return self.weight * loss, ValueMetrics(device_scalar(loss), clip_fraction)
