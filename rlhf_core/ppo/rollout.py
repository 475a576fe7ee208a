"""Collecting experience: what policy, reference and critic say of sampled replies.

Shapes: B sequences, T response positions.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core import distributed
from rlhf_core.errors import RlhfError
from rlhf_core.ppo.actor_critic_pair import ActorCriticPair
from rlhf_core.ppo.experience import Experience, TokenPredictions
from rlhf_core.ppo.kl import full_kl
from rlhf_core.sampling.generation import Rollout
from rlhf_core.sampling.token_scoring import (
    Tokens,
    entropy,
    gather_logprobs,
    pad_columns,
    response_log_distribution,
    shared_micro_batches,
)

# Sampler and trainer run different shapes through different kernels: the last digits differ, no more.
TOLERANCE = {torch.float32: 2e-3, torch.float64: 1e-6}
LOW_PRECISION_TOLERANCE = 0.2


def score_rollout(pair: ActorCriticPair, reference: PreTrainedModel, rollout: Rollout) -> Experience:
    """Compute log-probabilities, entropy, KL and values of sampled replies.

    Returns:
        The rollout without rewards and advantages, whole on every rank.

    Raises:
        RlhfError: The sampler and the trainer disagree about probabilities.
    """
    predictions = predict_tokens(pair, reference, rollout)
    check_sampler(rollout.logprobs, predictions.policy_logprobs, rollout.response_mask, pair.policy.dtype)
    return Experience.of_rollout(rollout, predictions)


def predict_tokens(pair: ActorCriticPair, reference: PreTrainedModel, rollout: Rollout) -> TokenPredictions:
    """Run policy, reference and critic over all replies, in micro-batches of similar length that the ranks share."""
    batch = Tokens(rollout.tokens, rollout.attention_mask, rollout.response_mask)
    columns = [torch.zeros(batch.response_mask.shape, device=batch.tokens.device) for _ in range(5)]
    for rows, weight in shared_micro_batches(rollout.attention_mask, pair.micro_batch_size):
        part = batch.part(rows)
        for column, values in zip(columns, _predict_part(pair, reference, part), strict=True):
            if weight:
                column[rows] = pad_columns(torch.where(part.response_mask, values, 0.0).to(column.dtype), batch.width)
    # Each rank has left zeros at the rows of the others.
    return TokenPredictions(*(distributed.all_reduce_sum(column) for column in columns))


@torch.inference_mode()
def _predict_part(pair: ActorCriticPair, reference: PreTrainedModel, part: Tokens) -> tuple[Tensor, ...]:
    """The fields of :class:`TokenPredictions` for one micro-batch, each (b, t)."""
    policy, values = pair.predict(part)
    # In critic pre-training the frozen policy is its own reference.
    same = reference is pair.policy
    ref = policy if same else response_log_distribution(reference, part, pair.sampling)
    return (
        gather_logprobs(policy, part.response),
        gather_logprobs(ref, part.response),
        full_kl(policy, ref),
        entropy(policy),
        values,
    )


def check_sampler(sampler: Tensor, trainer: Tensor, mask: Tensor, dtype: torch.dtype) -> float:
    """Compare the log-probabilities of sampler and trainer, (B, T) each: their ratio is 1 before any update.

    Returns:
        The largest difference at a response token.

    Raises:
        RlhfError: It is beyond the rounding of ``dtype``; PPO's ratios would be wrong from the first step on.
    """
    gap = float((sampler - trainer)[mask].abs().max()) if bool(mask.any()) else 0.0
    limit = TOLERANCE.get(dtype, LOW_PRECISION_TOLERANCE)
    if not gap <= limit:
        raise RlhfError(
            f"the sampler's log-probabilities differ from the trainer's by {gap:.3g} (at most {limit:g} is rounding): "
            "the distribution that samples is not the one that is scored; check that the model handles left padding, "
            "position ids and a key-value cache, and that its weights are finite"
        )
    return gap
