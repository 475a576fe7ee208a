"""A rollout: its prompts, what the models say of its replies, and its metrics.

Shapes: B sequences, T response positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.data.batches import batch_at
from rlhf_core.data.schema import Message
from rlhf_core.data.statistics import rank_correlation
from rlhf_core.data.text import commonest_share, is_refusal, mean, reply_statistics
from rlhf_core.data.tokens import encode_prompts
from rlhf_core.errors import DataError, RlhfError
from rlhf_core.models.precision import Precision, matmul_precision
from rlhf_core.ppo.actor_critic import ActorCriticPair
from rlhf_core.ppo.advantages import explained_variance
from rlhf_core.ppo.experience import Experience
from rlhf_core.ppo.losses import initial_ratio, masked_mean, sequence_sums
from rlhf_core.runtime import distributed
from rlhf_core.sampling.agreement import LIMITS
from rlhf_core.sampling.generation import Rollout
from rlhf_core.sampling.sampler import PromptBatch
from rlhf_core.sampling.token_scoring import (
    MicroBatch,
    Tokens,
    pad_columns,
    response_logits,
    token_statistics,
)
from rlhf_core.training.passes import run_side_by_side

COMPARABLE_TOKENS = 32  # halves of fewer tokens than these differ by chance
DIFFERENCE = "sampling_logp_difference"
Predict = Callable[[Tokens], dict[str, Tensor]]  # what models say of one micro-batch, (b, t) each


@dataclass(frozen=True)
class TrainingPrompts:
    """Prompts as messages and as tokens.

    Attributes:
        messages: The turns of each prompt, the last one the user's.
        ids: Their token ids, up to where the reply begins.
        columns: What else the records of the prompts say, by name, for reward functions.
    """

    messages: Sequence[Sequence[Message]]
    ids: Sequence[Sequence[int]]
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    @classmethod
    def encode(
        cls, tokenizer: PreTrainedTokenizerBase, messages: Sequence[Sequence[Message]]
    ) -> TrainingPrompts:
        """Encode prompts with the tokenizer's chat template."""
        return cls(messages, encode_prompts(tokenizer, messages))

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, size: int, seed: int, iteration: int, replies_per_prompt: int = 1) -> list[int]:
        """Row numbers of the prompts of an iteration's ``size`` replies.

        They are a function of the arguments alone.

        Each prompt comes ``replies_per_prompt`` times in a row; ``size`` must be a multiple of
        that.
        """
        rows: list[int] = []
        for row in batch_at(len(self), size // replies_per_prompt, seed, iteration):
            rows += [row] * replies_per_prompt
        return rows

    def batch(self, rows: Sequence[int], iteration: int, seed: int) -> PromptBatch:
        """The prompts of ``rows``.

        Every reply of every iteration has a random stream of its own.
        """
        streams = range(iteration * len(rows), (iteration + 1) * len(rows))
        return PromptBatch([list(self.ids[row]) for row in rows], streams, seed)


def require_room(
    prompts: Sequence[Sequence[int]], max_new_tokens: int, positions: int | None
) -> None:
    """Check that a reply of ``max_new_tokens`` fits the model, of ``positions``, behind each prompt.

    Raises:
        DataError: The longest prompt and reply exceed the model's positions.
    """
    longest = max((len(ids) for ids in prompts), default=0)
    if positions is None or longest + max_new_tokens <= positions:
        return
    remedy = "leave out long prompts, or take a model with more positions"
    if longest < positions:
        remedy = f"lower max_new_tokens to {positions - longest}, {remedy}"
    raise DataError(
        f"the longest prompt ({longest} tokens) and max_new_tokens ({max_new_tokens}) exceed the model's {positions} "
        f"positions: {remedy}"
    )


def score_rollout(
    pair: ActorCriticPair,
    reference: PreTrainedModel,
    rollout: Rollout,
    exact_kl: bool = True,
    every: int = 1,
) -> Experience:
    """Compute log-probabilities, entropy, KL and values of sampled replies.

    Without ``exact_kl`` the KL over the vocabulary is not computed: it stays NaN. With ``every``
    above 1 it does, too; the policy scores the first of every so many replies alone, and the
    sampler's log-probabilities count for all.

    Returns:
        The rollout without rewards and advantages, whole on every rank.

    Raises:
        RlhfError: The sampler and the trainer disagree about probabilities by more than rounding.
    """
    experience = predict_tokens(pair, reference, rollout, exact_kl, every)
    precision = matmul_precision(pair.policy)
    columns = experience.sampler_logprobs, experience.trainer_logprobs, experience.scored_mask
    differences = logprob_differences(*columns, precision)
    if every > 1 and not bool(rollout.logprobs[rollout.response_mask].isfinite().all()):
        differences = dict.fromkeys(differences, math.nan)  # of replies that are not scored, too
    require_agreement(differences, precision)
    return experience


def predict_tokens(
    pair: ActorCriticPair,
    reference: PreTrainedModel,
    rollout: Rollout,
    exact_kl: bool = True,
    every: int = 1,
) -> Experience:
    """Run reference and critic over all replies, and the policy over one of ``every``.

    Ranks share the parts.
    """
    batch = rollout.batch
    exact_kl = exact_kl and every == 1

    def all_statistics(part: Tokens) -> dict[str, Tensor]:
        policy, values = pair.predict(part)
        # In critic pre-training the frozen policy is its own reference.
        if reference is pair.policy:
            ref = policy
        else:
            ref = response_logits(reference, part)
        statistics = token_statistics(
            policy,
            part,
            pair.sampling,
            pair.logits_bytes,
            entropies=True,
            reference=ref,
            exact_kl=exact_kl,
        )
        return statistics | {"values": values}

    def without_policy(part: Tokens) -> dict[str, Tensor]:
        tokens = pair.statistics(response_logits(reference, part), part, False, None)
        return {"ref_logprobs": tokens["logprobs"], "values": pair.values(part)}

    def of_policy(part: Tokens) -> dict[str, Tensor]:
        return pair.statistics(response_logits(pair.policy, part), part, True, None)

    def without_gradients(predict: Predict, part: Tokens) -> dict[str, Tensor]:
        # Weights that are gathered in inference mode could not take part in the update.
        with torch.inference_mode() if pair.whole else torch.no_grad():
            return predict(part)

    runs: list[tuple[Tokens, Predict, int]] = [(batch, all_statistics, 1)]
    if every > 1:
        sample = batch.rows(slice(0, None, every))
        runs = [(batch, without_policy, 1), (sample, of_policy, every)]
    parts: list[tuple[MicroBatch, int]] = []
    tasks: list[Callable[[], dict[str, Tensor]]] = []
    for tokens, predict, apart in runs:
        for micro in pair.limits.split(tokens):
            parts.append((micro, apart))
            tasks.append(partial(without_gradients, predict, micro.tokens))
    predictions = run_side_by_side(*tasks, models=[*pair.models, reference])
    names = ["logprobs", "ref_logprobs", "entropy", "values"]
    if exact_kl:
        names.append("full_kl")
    shape = batch.response_mask.shape
    device = batch.tokens.device
    columns = {name: torch.zeros(shape, device=device) for name in names}
    for (micro, apart), predicted in zip(parts, predictions, strict=True):
        if not micro.weight:
            continue
        for name, values in predicted.items():
            column = columns[name]
            real = torch.where(micro.tokens.response_mask, values, 0.0).to(column.dtype)
            column[apart * micro.rows] = pad_columns(real, batch.width)
    scored = torch.arange(len(batch.tokens), device=device) % every == 0
    for name in ("logprobs", "entropy"):
        columns[name].masked_fill_(~scored.unsqueeze(1), math.nan)
    # Each rank has left zeros at the rows of the others.
    whole = [distributed.all_reduce_sum(column) for column in columns.values()]
    return Experience.of_rollout(rollout, *whole, scored=None if every == 1 else scored)


def logprob_differences(
    sampler: Tensor, trainer: Tensor, mask: Tensor, precision: Precision
) -> dict[str, float]:
    """Measure how far the sampler's log-probabilities are from the trainer's.

    Both are of the sampled tokens, before any update.

    Both compute the log-probability of every sampled token with the same weights, the sampler token
    by token with a key-value cache, the trainer in one pass. Beyond rounding they must agree, or
    PPO's ratios are wrong from the first step on (algorithms.md §9, trap 1). Rounding scatters:
    single tokens may differ by a lot where the mean does not, and the longest reply of a run has
    the largest difference of all. So the mean, the share of tokens that differ much and the growth
    along the reply decide, each against what the precision of the computation explains.

    Returns:
        ``sampling_logp_difference_mean``, absolute and per token; ``…_share`` of tokens that differ
        by more than ``RoundingLimits.token``, 0 if only one does; ``…_growth``, the mean of the
        later half of each reply minus that of the earlier half, 0 in a rollout of too few tokens to
        compare them; ``sampler_gap``, the largest difference.
    """
    if not bool(mask.any()):
        return dict.fromkeys(
            (*(f"{DIFFERENCE}_{what}" for what in ("mean", "share", "growth")), "sampler_gap"), 0.0
        )
    difference = (sampler - trainer).double().abs().masked_fill(~mask, 0.0)
    far = difference > LIMITS[precision].token
    positions = mask.cumsum(dim=1)  # of response tokens, from 1
    later = mask & (2 * positions > mask.sum(dim=1, keepdim=True))
    earlier = mask & ~later
    comparable = int(earlier.sum()) >= COMPARABLE_TOKENS
    growth = (
        float(masked_mean(difference, later) - masked_mean(difference, earlier))
        if comparable
        else 0.0
    )
    return {
        f"{DIFFERENCE}_mean": float(masked_mean(difference, mask)),
        f"{DIFFERENCE}_share": float(masked_mean(far.double(), mask))
        if int(far.sum()) > 1
        else 0.0,
        f"{DIFFERENCE}_growth": growth,
        "sampler_gap": float(difference.max()),
    }


def require_agreement(agreement: Mapping[str, float], precision: Precision) -> None:
    """Refuse to train where sampler and trainer differ by more than rounding.

    Raises:
        RlhfError: They do, or a log-probability is not finite.
    """
    limits = LIMITS[precision]
    compared = {
        "on average by": (agreement[f"{DIFFERENCE}_mean"], limits.mean),
        f"by more than {limits.token:g} nats in a share of": (
            agreement[f"{DIFFERENCE}_share"],
            limits.share,
        ),
        "towards the end of replies by a further": (
            agreement[f"{DIFFERENCE}_growth"],
            limits.growth,
        ),
    }
    beyond = [
        f"{what} {value:.3g} (at most {limit:g})"
        for what, (value, limit) in compared.items()
        if not value <= limit
    ]
    if beyond:
        raise RlhfError(
            f"the sampler's log-probabilities differ from the trainer's {', '.join(beyond)}, more than the rounding of "
            f"{precision} explains: the distribution that samples is not the one that is scored; check that the model "
            "handles left padding, position ids and a key-value cache, and that its weights are finite"
        )


def rollout_metrics(
    experience: Experience,
    replies: Sequence[str],
    referee_rewards: Tensor | None = None,
    precision: Precision = "float32",
    with_critic: bool = True,
    with_exact_kl: bool = True,
) -> dict[str, float]:
    """Measure a rollout with rewards and advantages.

    The metrics tell health from collapse (algorithms.md §8; paper, §5.2).

    All of it comes from the rollout, before the update that it feeds, and may be NaN, which the
    health monitor wants to see. No judge is asked but the learned ones: a user without a gold
    standard has all of them.

    Args:
        experience: The rollout.
        replies: Its replies as text, without end markers.
        referee_rewards: The referee's rewards (B,) of the same replies.
        precision: The policy's, by which sampler and trainer are compared.
        with_critic: Whether a critic gave values.
        with_exact_kl: Whether the KL over the vocabulary was computed.
    """
    mask = experience.response_mask
    learnable = experience.learnable()  # what is said of rewards and values is said of these
    rewards = learnable.rewards
    metrics = reward_distribution(rewards)
    metrics |= drift_metrics(experience.policy_logprobs, experience.ref_logprobs, mask)
    metrics |= reply_metrics(replies, experience.lengths.tolist(), experience.finished.tolist())
    if with_exact_kl:
        metrics["kl_full"] = float(sequence_sums(experience.full_kl, mask).mean())
    metrics["entropy"] = float(masked_mean(experience.entropy.double(), experience.scored_mask))
    metrics["reward_length_correlation"] = rank_correlation(
        _numpy(rewards), _numpy(learnable.lengths)
    )
    metrics["reward_treated"] = float(learnable.shaped_rewards.mean())
    if with_critic:
        metrics["explained_variance"] = explained_variance(
            learnable.values, learnable.monte_carlo_returns, learnable.response_mask
        )
    metrics["first_ratio"] = initial_ratio(experience)
    compared = experience.sampler_logprobs, experience.trainer_logprobs, experience.scored_mask
    metrics |= logprob_differences(*compared, precision)
    if referee_rewards is not None:
        metrics["referee_mean"] = float(referee_rewards.double().mean())
        compared_rewards = referee_rewards[experience.rewarded]
        metrics["reward_referee_correlation"] = rank_correlation(
            _numpy(rewards), _numpy(compared_rewards)
        )
    return metrics


@np.errstate(invalid="ignore")  # rewards that are not finite give NaN without a warning of NumPy's
def reward_distribution(rewards: Tensor) -> dict[str, float]:
    """Describe raw rewards (B,).

    ``reward_tail`` is median - 5th percentile: a long lower tail is where the paper's collapsing
    runs showed first.
    """
    values = _numpy(rewards)
    p05, p25, p50, p75, p95 = (float(np.percentile(values, p)) for p in (5, 25, 50, 75, 95))
    return {
        "reward_mean": float(values.mean()),
        "reward_std": float(values.std()),
        "reward_min": float(values.min()),
        "reward_max": float(values.max()),
        "reward_p05": p05,
        "reward_p25": p25,
        "reward_p50": p50,
        "reward_p75": p75,
        "reward_p95": p95,
        "reward_tail": p50 - p05,
    }


def drift_metrics(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> dict[str, float]:
    """Measure the policy's drift from the reference in nats per sequence.

    Both log-probabilities (B, T) are those of the sampled tokens.

    With d = logprob - ref_logprob: ``kl`` is the mean over sequences of sum d (k1), ``kl_k2`` of
    sum d²/2, ``kl_k3`` of sum (exp(-d) - 1 + d). ``perplexity`` is the policy's on its own replies,
    ``perplexity_reference`` the reference's.
    """
    mask, logprobs, ref_logprobs = mask.bool(), logprobs.double(), ref_logprobs.double()
    difference = (logprobs - ref_logprobs).masked_fill(~mask, 0.0)
    third = torch.exp(-difference) - 1.0 + difference
    return {
        "kl": float(sequence_sums(difference, mask).mean()),
        "kl_k2": float(sequence_sums(difference.square() / 2, mask).mean()),
        "kl_k3": float(sequence_sums(third, mask).mean()),
        "kl_per_token": float(masked_mean(difference, mask)),
        "perplexity": float(np.exp(-float(masked_mean(logprobs, mask)))),
        "perplexity_reference": float(np.exp(-float(masked_mean(ref_logprobs, mask)))),
    }


def reply_metrics(
    replies: Sequence[str], lengths: Sequence[int], finished: Sequence[bool]
) -> dict[str, float]:
    """Measure what decoded replies look like.

    That is lengths in tokens with the end marker, and statistics of their text.
    """
    normalised = [" ".join(reply.casefold().split()) for reply in replies]
    refused = [is_refusal(reply) for reply in replies]
    return reply_statistics(replies, lengths, finished) | {
        "length_p95": float(np.percentile(lengths, 95)),
        "commonest_reply": commonest_share(normalised),
        "refusals": mean(refused),
    }


def _numpy(values: Tensor) -> np.ndarray:
    return values.detach().double().cpu().numpy()
