"""How far a policy has moved from the reference: KL and perplexity, on the policy's own on-policy replies."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core.data.batches import gather_passes
from rlhf_core.evaluation.replies.generation import OnPolicyReplies
from rlhf_core.evaluation.statistics import one_each, standard_error
from rlhf_core.runtime import distributed
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.sampling.generation import Rollout
from rlhf_core.sampling.token_scoring import DistributionScorer, Tokens, response_logits


@dataclass(frozen=True)
class Drift:
    """Distance of a policy from the reference.

    Attributes:
        kl: Mean over sequences of the summed log-ratio (estimator k1, nats per sequence).
        kl_error: Standard error of ``kl`` over clusters of prompts; 0 where all prompts ask the same.
        perplexity: exp of the reference's mean negative log-probability per response token.
    """

    kl: float
    kl_error: float
    perplexity: float


def measure_drift(sampled: OnPolicyReplies, reference: PreTrainedModel, clusters: np.ndarray | None = None) -> Drift:
    """Measure how far the policy that wrote ``sampled`` is from ``reference``; ranks share the work.

    ``clusters`` are those of the prompts, of which the first were replied to; None: each is one of its own.
    """
    log_ratios: list[list[float]] = []  # by batch
    reference_nats, tokens = 0.0, 0
    for rollout, weight in zip(sampled.rollouts, sampled.weights, strict=True):
        reference_logprobs = _score_tokens(rollout, reference, sampled.sampling)
        if not weight:
            continue
        policy_logprobs = rollout.logprobs.double().masked_fill(~rollout.response_mask, 0.0)
        log_ratios.append((policy_logprobs - reference_logprobs).sum(dim=1).tolist())
        reference_nats -= float(reference_logprobs.sum())
        tokens += int(rollout.response_mask.sum())
    of_replies = gather_passes(log_ratios)
    sums = distributed.reduce_metrics({"nats": reference_nats, "tokens": tokens})
    known = None if clusters is None else clusters[: len(of_replies)]
    error, _ = standard_error(np.array(of_replies), one_each(len(of_replies), known))
    # The exponent is bounded so that a ruined policy gives a huge finite number, which JSON and gates can hold.
    perplexity = math.exp(min(sums["nats"] / max(sums["tokens"], 1), 700.0))
    return Drift(float(np.mean(of_replies)), error if math.isfinite(error) else 0.0, perplexity)


@torch.inference_mode()
def _score_tokens(rollout: Rollout, model: PreTrainedModel, sampling: Sampling) -> Tensor:
    """Log-probabilities of the sampled tokens under ``model``, (B, T) float64, 0 at masked positions."""
    batch = Tokens(rollout.tokens, rollout.attention_mask, rollout.response_mask)
    scored = torch.zeros(rollout.logprobs.shape, dtype=torch.float64, device=rollout.logprobs.device)
    # In one pass: the rollout fitted into memory while it was sampled.
    rows = rollout.attention_mask.sum(dim=1).argsort(stable=True)
    part = batch.part(rows)
    logprobs = DistributionScorer(sampling).score(response_logits(model, part), part).logprobs.double()
    scored[rows, : part.width] = logprobs.masked_fill(~part.response_mask, 0.0)
    return scored
