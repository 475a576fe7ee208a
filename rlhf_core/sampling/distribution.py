"""The distribution that rollouts are sampled from, used by the sampler and by every later scoring alike.

Temperature and the minimum length belong to that distribution; top-p and the repetition penalty do not, and exist for
evaluation only (algorithms.md §9, trap 1). Shapes: B sequences, T positions, V vocabulary, L tokens so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlhf_core.config.model import SamplingConfig

# Finite, because -inf minus -inf would turn an exact KL into NaN; exp of it is exactly zero all the same.
FORBIDDEN = -1e9


@dataclass(frozen=True)
class Sampling:
    """Settings of the training distribution, and the two token ids that a response needs."""

    eos_id: int
    pad_id: int
    max_new_tokens: int
    temperature: float = 1.0
    min_new_tokens: int = 0


def log_distribution(logits: Tensor, sampling: Sampling, first: int = 0) -> Tensor:
    """Log-probabilities (B, T, V) in float32 of response positions ``first`` .. ``first + T - 1`` from their logits.

    The end marker cannot occur before position ``min_new_tokens``.
    """
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    if sampling.temperature != 1.0:
        logits = logits / sampling.temperature
    early = sampling.min_new_tokens - first
    if early > 0:
        forbidden = torch.zeros(logits.shape[1:], dtype=torch.bool, device=logits.device)
        forbidden[:early, sampling.eos_id] = True
        logits = logits.masked_fill(forbidden, FORBIDDEN)
    return torch.log_softmax(logits, dim=-1)


def inverse_cdf(log_probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Sample by inverting the cumulative distribution: (B, V), uniforms in [0, 1) float64 (B,) -> token ids (B,)."""
    cumulative = log_probabilities.double().exp().cumsum(dim=-1)
    thresholds = (uniforms * cumulative[:, -1]).unsqueeze(-1)
    # A token of probability zero has the same cumulative value as the one before it, so it is never the first above.
    picked = torch.searchsorted(cumulative, thresholds, right=True).squeeze(-1)
    return picked.clamp(max=log_probabilities.shape[-1] - 1)


def philox_uniforms(seed: int, streams: Sequence[int], length: int) -> Tensor:
    """Uniform numbers (B, length) float64; row b is a function of (seed, streams[b]) alone.

    So which process or batch a prompt falls into never changes what is sampled for it.
    """
    rows = [np.random.Generator(np.random.Philox(key=[seed, stream])).random(length) for stream in streams]
    return torch.from_numpy(np.stack(rows)) if rows else torch.zeros(0, length, dtype=torch.float64)


def evaluation_distribution(logits: Tensor, history: Tensor, seen: Tensor, config: SamplingConfig) -> Tensor:
    """Filtered log-probabilities (B, V) for evaluation: repetition penalty, temperature, then top-p.

    ``history`` (B, L) are prompt and reply so far, ``seen`` (B, L) says which of them are real tokens. The penalty
    divides positive and multiplies negative logits of tokens that occurred (Keskar et al. 2019). Top-p keeps the
    smallest set of tokens whose probability reaches ``top_p`` (Holtzman et al. 2020).
    """
    logits = logits.float()
    if config.repetition_penalty != 1.0:
        occurred = torch.zeros_like(logits, dtype=torch.int32).scatter_add_(1, history, seen.int()) > 0
        penalised = torch.where(logits > 0, logits / config.repetition_penalty, logits * config.repetition_penalty)
        logits = torch.where(occurred, penalised, logits)
    logits = logits / config.temperature
    if config.top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True)
        probabilities = ordered.softmax(dim=-1)
        outside = probabilities.cumsum(dim=-1) - probabilities >= config.top_p
        dropped = torch.zeros_like(outside).scatter(1, order, outside)
        logits = logits.masked_fill(dropped, FORBIDDEN)
    return torch.log_softmax(logits, dim=-1)
