"""Replies of a model to prompts: with the evaluation filters for judging, without any for measuring drift."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core import distributed
from rlhf_core.config.model import SamplingConfig
from rlhf_core.data.chat import decode_reply, encode_prompt, pad_id
from rlhf_core.data.schema import Message
from rlhf_core.data.sharding import passes
from rlhf_core.evaluation.text_metrics import Reply
from rlhf_core.sampling.distribution import Sampling, philox_uniforms
from rlhf_core.sampling.generation import Rollout, evaluation_generate, generate
from rlhf_core.sampling.token_scoring import Tokens, gather_logprobs, micro_batches, response_log_distribution

BATCH = 64


@dataclass(frozen=True)
class Sampled:
    """Unfiltered replies to all prompts, with what is needed to score them again: one rollout per batch.

    Of several ranks each has the rollouts of its share; one of weight 0 only keeps it in step with the others.
    """

    replies: list[Reply]
    rollouts: list[Rollout]
    weights: list[float]
    sampling: Sampling


@dataclass(frozen=True)
class Drift:
    """``kl``: mean over sequences of the summed log-ratio (k1, nats per sequence); ``kl_error``: its standard error.
    ``perplexity``: exp of the reference's mean negative log-probability per response token."""

    kl: float
    kl_error: float
    perplexity: float


def judged_replies(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[Message]],
    config: SamplingConfig,
    seed: int,
    on_batch: Callable[[int], None] = lambda done: None,
    batch_size: int = BATCH,
) -> list[Reply]:
    """One reply per prompt with evaluation sampling. Prompt ``i`` uses random stream ``i`` of ``seed``, so two models
    get the same random numbers and batches change nothing. ``on_batch`` is told how many replies were added."""
    eos, pad = int(tokenizer.eos_token_id), pad_id(tokenizer)
    replies: list[Reply] = []
    for rows in _batches(len(prompts), batch_size):
        ids = [encode_prompt(tokenizer, prompts[i]) for i in rows]
        uniforms = philox_uniforms(seed, rows, config.max_new_tokens)
        replies += _decoded(tokenizer, evaluation_generate(model, ids, uniforms, config, eos, pad))
        on_batch(len(rows))
    return replies


def unfiltered_replies(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[Message]],
    max_new_tokens: int,
    seed: int,
    batch_size: int = BATCH,
) -> Sampled:
    """One reply per prompt at temperature 1 without filters: the distribution that KL figures are about."""
    sampling = Sampling(int(tokenizer.eos_token_id), pad_id(tokenizer), max_new_tokens)
    replies: list[Reply] = []
    rollouts, weights = [], []
    for rows, weight in passes(list(range(len(prompts))), batch_size):
        ids = [encode_prompt(tokenizer, prompts[i]) for i in rows]
        rollouts.append(generate(model, ids, philox_uniforms(seed, rows, max_new_tokens), sampling))
        weights.append(weight)
        if weight:
            replies += _decoded(tokenizer, rollouts[-1])
    gathered = [Reply(**fields) for fields in distributed.gather_items([asdict(reply) for reply in replies])]
    return Sampled(gathered, rollouts, weights, sampling)


def measure_drift(sampled: Sampled, reference: PreTrainedModel) -> Drift:
    """How far the sampling policy is from ``reference``, on the policy's own unfiltered samples."""
    ratios: list[float] = []
    total, tokens = 0.0, 0
    for rollout, weight in zip(sampled.rollouts, sampled.weights, strict=True):
        scored = _reference_logprobs(rollout, reference, sampled.sampling)
        if not weight:
            continue
        mask = rollout.response_mask
        sampler = rollout.logprobs.double().masked_fill(~mask, 0.0)
        ratios += (sampler - scored).sum(dim=1).tolist()
        total, tokens = total - float(scored.sum()), tokens + int(mask.sum())
    ratios = distributed.gather_items(ratios)
    sums = distributed.reduce_metrics({"total": total, "tokens": tokens})
    total, tokens = sums["total"], int(sums["tokens"])
    error = float(np.std(ratios, ddof=1)) / math.sqrt(len(ratios)) if len(ratios) > 1 else 0.0
    # The exponent is bounded so that a ruined policy gives a huge finite number, which JSON and gates can hold.
    return Drift(float(np.mean(ratios)), error, math.exp(min(total / max(tokens, 1), 700.0)))


@torch.inference_mode()
def _reference_logprobs(rollout: Rollout, reference: PreTrainedModel, sampling: Sampling) -> Tensor:
    """Log-probabilities of the sampled tokens under ``reference``, (B, T) float64, 0 at masked positions."""
    batch = Tokens(rollout.tokens, rollout.attention_mask, rollout.response_mask)
    scored = torch.zeros(rollout.logprobs.shape, dtype=torch.float64, device=rollout.logprobs.device)
    # A rollout fitted into memory while it was sampled.
    for rows in micro_batches(rollout.attention_mask, len(rollout.tokens)):
        part = batch.part(rows)
        values = gather_logprobs(response_log_distribution(reference, part, sampling), part.response).double()
        scored[rows, : part.width] = values.masked_fill(~part.response_mask, 0.0)
    return scored


def _decoded(tokenizer: PreTrainedTokenizerBase, rollout: Rollout) -> list[Reply]:
    replies = []
    for ids in rollout.replies():
        text, finished = decode_reply(tokenizer, ids)
        replies.append(Reply(text, finished, len(ids)))
    return replies


def _batches(count: int, size: int) -> list[list[int]]:
    return [list(range(start, min(start + size, count))) for start in range(0, count, size)]
