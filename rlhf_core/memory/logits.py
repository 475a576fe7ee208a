"""Bytes of logits and what is computed from them: with a large vocabulary often the peak of a small model.

Everything after the unembedding is float32; a copy is ``4 N V`` bytes for N positions and V vocabulary entries.
"""

from __future__ import annotations

from rlhf_core.config.ppo import PpoConfig
from rlhf_core.memory.placement import Placement
from rlhf_core.memory.shapes import Shape

COPY = 4
# The sampler inverts the cumulative distribution in float64: log-probabilities, doubles and their exponentials.
SAMPLER_BYTES = 4 + 8 + 8
# Top-p sorts: logits, the ordered ones with their places (int64), probabilities, their sums and two masks.
FILTER_BYTES = 4 + 4 + 8 + 4 + 4 + 4 + 2


def one_copy(shape: Shape, positions: int) -> int:
    """One float32 tensor over the vocabulary."""
    return COPY * positions * shape.vocabulary


def forward_copies(shape: Shape, positions: int, placement: Placement, changed: bool = False) -> int:
    """Logits as the model gives them, a float32 version where that is another tensor, and log-probabilities."""
    between = COPY if placement.element < COPY or changed else 0
    return positions * shape.vocabulary * (placement.element + between + COPY)


def policy_backward_copies(config: PpoConfig) -> int:
    """Float32 copies at the peak of the policy's backward pass.

    Log-probabilities, their gradient, and that of the logits. An entropy term and an exact KL in the loss each add what
    their product keeps and its gradient.
    """
    exact = config.kl.placement == "loss" and config.kl.estimator == "full" and config.kl.coefficient > 0
    return 3 + 2 * (config.entropy.kind != "off") + 2 * exact


def scoring_copies(same: bool) -> int:
    """Float32 copies while rollouts are scored: log-probabilities of policy and reference, and for the exact KL the
    exponential, the difference and their product."""
    return (1 if same else 2) + 3


def sampler(shape: Shape, rows: int, placement: Placement) -> int:
    """What sampling one token of each row holds."""
    return rows * shape.vocabulary * (placement.element + SAMPLER_BYTES)


def filters(shape: Shape, rows: int, placement: Placement) -> int:
    """What sampling one token of each row holds with the evaluation filters."""
    return rows * shape.vocabulary * (placement.element + FILTER_BYTES)
