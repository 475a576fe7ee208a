"""Sampling over data-parallel ranks: each rank samples its share of the prompts, and gets all replies.

Shapes: B sequences, P prompt width (left-padded), T response width (right-padded).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import Tensor

from rlhf_core.runtime import distributed
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.sampling.generation import Rollout
from rlhf_core.sampling.sampler import PromptBatch, Sampler


def sample_replies(
    sampler: Sampler, version: int, prompts: PromptBatch, sampling: Sampling, batch_size: int | None = None
) -> Rollout:
    """Sample one reply per prompt, at most ``batch_size`` prompts of a rank at a time (all of them for ``None``).

    Args:
        sampler: Has the weights of ``version``.
        version: The weights to sample with.
        prompts: Those of all ranks.
        sampling: The training distribution.
        batch_size: Bounds the memory of one call of the sampler.

    Returns:
        The replies to all prompts, on every rank. Those of a bit-exact sampler have the bits of one process and batch,
        as far as a row's products do not depend on the number of rows.
    """
    width = max(map(len, prompts.ids), default=0)
    ids, streams = distributed.shard_for_rank(prompts.ids), distributed.shard_for_rank(prompts.streams)
    together = batch_size or max(len(ids), 1)
    starts = range(0, max(len(ids), 1), together)
    parts = []
    with sampler.awake(version, min(together, len(ids)), len(starts) * sampling.max_new_tokens):
        for start in starts:
            rows = slice(start, start + together)
            parts.append(sampler.sample(PromptBatch(ids[rows], streams[rows], prompts.seed, width), sampling))
    rollout = gather_rollout(concatenate(parts, sampling.pad_id), len(prompts), sampling.pad_id)
    # Inference tensors cannot take part in autograd later, so plain copies go on.
    return Rollout(**{field.name: getattr(rollout, field.name).clone() for field in fields(Rollout)})


def concatenate(parts: Sequence[Rollout], pad_id: int) -> Rollout:
    """Join rollouts of several batches, whose prompts are equally wide: responses are padded to the widest."""
    if len(parts) == 1:
        return parts[0]
    widest = max(part.response_mask.shape[1] for part in parts)

    def widened(part: Rollout, values: Tensor, fill: float) -> Tensor:
        return torch.nn.functional.pad(values, (0, widest - part.response_mask.shape[1]), value=fill)

    return Rollout(
        tokens=torch.cat([widened(part, part.tokens, pad_id) for part in parts]),
        attention_mask=torch.cat([widened(part, part.attention_mask, 0) for part in parts]),
        response_mask=torch.cat([widened(part, part.response_mask, 0) for part in parts]),
        logprobs=torch.cat([widened(part, part.logprobs, 0) for part in parts]),
        finished=torch.cat([part.finished for part in parts]),
    )


def gather_rollout(own: Rollout, total: int, pad_id: int) -> Rollout:
    """Join the rollouts of all ranks, whose prompts are equally wide, to one of ``total`` rows."""
    return Rollout(
        tokens=distributed.gather_rows(own.tokens, total, pad_id),
        attention_mask=distributed.gather_rows(own.attention_mask, total),
        response_mask=distributed.gather_rows(own.response_mask, total),
        logprobs=distributed.gather_rows(own.logprobs, total),
        finished=distributed.gather_rows(own.finished, total),
    )
