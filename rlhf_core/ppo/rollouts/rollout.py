"""Collecting experience: what policy, reference and critic say of sampled replies.

Shapes: B sequences, T response positions.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core.models.adapters.frozen_lower_layers import FrozenLowerLayers
from rlhf_core.models.precision import matmul_precision
from rlhf_core.ppo.experience import Experience, TokenPredictions
from rlhf_core.ppo.learners.actor_critic_pair import ActorCriticPair
from rlhf_core.ppo.rollouts.sampler_agreement import SamplerAgreement, require_agreement
from rlhf_core.runtime import distributed
from rlhf_core.sampling.generation import Rollout
from rlhf_core.sampling.token_scoring import Tokens, pad_columns, response_logits
from rlhf_core.training.side_by_side import run_side_by_side


def score_rollout(
    pair: ActorCriticPair, reference: PreTrainedModel, rollout: Rollout, exact_kl: bool = True
) -> Experience:
    """Compute log-probabilities, entropy, KL and values of sampled replies.

    Without ``exact_kl`` the KL over the vocabulary is not computed: it stays NaN.

    Returns:
        The rollout without rewards and advantages, whole on every rank.

    Raises:
        RlhfError: The sampler and the trainer disagree about probabilities by more than rounding.
    """
    predictions = predict_tokens(pair, reference, rollout, exact_kl)
    sampler, trainer, mask = rollout.logprobs, predictions.policy_logprobs, rollout.response_mask
    precision = matmul_precision(pair.policy)
    require_agreement(SamplerAgreement.of(sampler, trainer, mask, precision), precision)
    return Experience.of_rollout(rollout, predictions)


def predict_tokens(
    pair: ActorCriticPair, reference: PreTrainedModel, rollout: Rollout, exact_kl: bool = True
) -> TokenPredictions:
    """Run policy, reference and critic over all replies, in micro-batches of similar length that the ranks share."""
    batch = Tokens(rollout.tokens, rollout.attention_mask, rollout.response_mask)
    lower_layers = FrozenLowerLayers.shared_by(pair.policy, reference)
    columns = [torch.zeros(batch.response_mask.shape, device=batch.tokens.device) for _ in range(5 if exact_kl else 4)]
    parts = list(pair.limits.split(batch))
    tasks = [partial(_predict_part, pair, reference, micro.tokens, exact_kl, lower_layers) for micro in parts]
    predictions = run_side_by_side(*tasks, models=[*pair.models, reference])
    for micro, predicted in zip(parts, predictions, strict=True):
        mask = micro.tokens.response_mask
        for column, values in zip(columns, predicted, strict=True):
            if micro.weight:
                column[micro.rows] = pad_columns(torch.where(mask, values, 0.0).to(column.dtype), batch.width)
    # Each rank has left zeros at the rows of the others.
    logprobs, ref_logprobs, entropy, values, *kl = (distributed.all_reduce_sum(column) for column in columns)
    full_kl = kl[0] if kl else torch.full_like(values, math.nan)
    return TokenPredictions(logprobs, ref_logprobs, full_kl, entropy, values)


@torch.inference_mode()
def _predict_part(
    pair: ActorCriticPair, reference: PreTrainedModel, part: Tokens, exact_kl: bool, lower_layers: FrozenLowerLayers
) -> tuple[Tensor, ...]:
    """Log-probabilities by policy and reference, entropy, values and exact KL of one micro-batch, each (b, t)."""
    with lower_layers.recorded():
        policy, values = pair.predict(part)
    # In critic pre-training the frozen policy is its own reference.
    ref = policy
    if reference is not pair.policy:
        with lower_layers.replayed():
            ref = response_logits(reference, part)
    tokens = pair.scorer.score(policy, part, entropies=True, reference=ref, exact_kl=exact_kl)
    assert tokens.ref_logprobs is not None and tokens.entropy is not None
    kl = () if tokens.full_kl is None else (tokens.full_kl,)
    return tokens.logprobs, tokens.ref_logprobs, tokens.entropy, values, *kl
