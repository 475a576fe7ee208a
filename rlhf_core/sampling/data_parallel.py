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
        The replies to all prompts, on every rank; those of a bit-exact sampler equal those of one process and batch.
    """
    ids, streams = distributed.shard_for_rank(prompts.ids), distributed.shard_for_rank(prompts.streams)
    together = batch_size or max(len(ids), 1)
    starts = range(0, max(len(ids), 1), together)
    parts = []
    with sampler.awake(version, min(together, len(ids)), len(starts) * sampling.max_new_tokens):
        for start in starts:
            rows = slice(start, start + together)
            parts.append(sampler.sample(PromptBatch(ids[rows], streams[rows], prompts.seed), sampling))
    own = concatenate(parts, sampling.pad_id)
    rollout = gather_rollout(own, [len(prompt) for prompt in prompts.ids], sampling.pad_id)
    # Inference tensors cannot take part in autograd later, so plain copies go on.
    return Rollout(**{field.name: getattr(rollout, field.name).clone() for field in fields(Rollout)})


def concatenate(parts: Sequence[Rollout], pad_id: int) -> Rollout:
    """Join rollouts of several batches: prompts padded on the left, responses on the right, to the widest."""
    if len(parts) == 1:
        return parts[0]
    prompt = max(part.tokens.shape[1] - part.response_mask.shape[1] for part in parts)
    reply = max(part.response_mask.shape[1] for part in parts)

    def widened(part: Rollout, values: Tensor, fill: float) -> Tensor:
        width = part.response_mask.shape[1]
        left = prompt - (part.tokens.shape[1] - width) if values.shape[1] > width else 0
        return torch.nn.functional.pad(values, (left, reply - width), value=fill)

    return Rollout(
        tokens=torch.cat([widened(part, part.tokens, pad_id) for part in parts]),
        attention_mask=torch.cat([widened(part, part.attention_mask, 0) for part in parts]),
        response_mask=torch.cat([widened(part, part.response_mask, 0) for part in parts]),
        logprobs=torch.cat([widened(part, part.logprobs, 0) for part in parts]),
        finished=torch.cat([part.finished for part in parts]),
    )


def gather_rollout(own: Rollout, prompt_lengths: Sequence[int], pad_id: int) -> Rollout:
    """Join the rollouts of all ranks, given the lengths of all prompts."""
    if distributed.world_size() == 1:
        return own
    total, width = len(prompt_lengths), own.response_mask.shape[1]
    prompt = own.tokens.shape[1] - width
    missing = max(prompt_lengths) - prompt

    def gathered(values: Tensor, fill: float = 0) -> Tensor:
        return distributed.gather_rows(values, total, fill)

    def gathered_prompts(values: Tensor, fill: float) -> Tensor:
        return gathered(torch.nn.functional.pad(values[:, :prompt], (missing, 0), value=fill))

    attention = gathered_prompts(own.attention_mask, 0), gathered(own.attention_mask[:, prompt:])
    return Rollout(
        tokens=torch.cat([gathered_prompts(own.tokens, pad_id), gathered(own.tokens[:, prompt:], pad_id)], dim=1),
        attention_mask=torch.cat(attention, dim=1),
        response_mask=gathered(own.response_mask),
        logprobs=gathered(own.logprobs),
        finished=gathered(own.finished),
    )
