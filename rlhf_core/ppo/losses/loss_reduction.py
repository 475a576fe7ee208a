"""From per-token terms to one number, so that micro-batch size and order never change the gradient.

A per-micro-batch mean would weight short batches more, so every term is divided by counts of the *whole* optimiser
step. Shapes: B sequences, T response positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token", "sequence"]


@dataclass(frozen=True)
class StepSize:
    """Response tokens and sequences in one optimiser step, over all micro-batches and ranks."""

    tokens: int
    sequences: int

    @staticmethod
    def of(mask: Tensor) -> StepSize:
        """Count a step whose response mask (B, T) is ``mask``."""
        return StepSize(int(mask.sum()), mask.shape[0])


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum of ``values`` (B, T) where ``mask`` holds. Masked positions may hold anything, NaN included."""
    return torch.where(mask, values, torch.zeros_like(values)).sum()


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of ``values`` (B, T) over the positions where ``mask`` holds; 0 where there are none."""
    return masked_sum(values, mask) / mask.sum().clamp(min=1)


def sequence_sums(values: Tensor, mask: Tensor) -> Tensor:
    """Sum over the response of each sequence: (B, T) -> (B,)."""
    return torch.where(mask, values, torch.zeros_like(values)).sum(dim=1)


def aggregate(values: Tensor, mask: Tensor, size: StepSize, mode: Aggregation) -> Tensor:
    """This micro-batch's share of the step's loss (algorithms.md §6).

    ``token``: sum over tokens / tokens of the step. ``sequence``: mean over each sequence's tokens, then sum over
    sequences / sequences of the step. Shares of all micro-batches add up to the loss of the full batch.
    """
    if mode == "token":
        return masked_sum(values, mask) / size.tokens
    means = sequence_sums(values, mask) / mask.sum(dim=1).clamp(min=1)
    return means.sum() / size.sequences
