"""Collecting experience: sample, score, value, reward, advantage. Shapes: B sequences, T response positions."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core import distributed
from rlhf_core.config.ppo import RolloutConfig
from rlhf_core.errors import RlhfError
from rlhf_core.models.actor_critic import ActorCritic
from rlhf_core.models.heads import LastTokenModel
from rlhf_core.ppo.advantages import gae, monte_carlo_returns
from rlhf_core.ppo.experience import Experience
from rlhf_core.ppo.kl import full_kl, kl_estimate
from rlhf_core.ppo.rewards import RunningMeanStd, apply_penalties, normalize_and_clip_rewards, token_rewards
from rlhf_core.sampling.distribution import Sampling, philox_uniforms
from rlhf_core.sampling.generation import Rollout, generate
from rlhf_core.sampling.token_scoring import (
    Tokens,
    TokenScorer,
    entropy,
    gather_logprobs,
    pad_columns,
    policy_and_values,
    response_log_distribution,
    response_values,
    shared_micro_batches,
)

Scorer = Callable[[Tokens], Tensor]  # raw score of every reply (B,)
# Sampler and trainer run different shapes through different kernels: the last digits differ, no more.
TOLERANCE = {torch.float32: 2e-3, torch.float64: 1e-6}
LOW_PRECISION_TOLERANCE = 0.2


@dataclass(frozen=True)
class Actors:
    """The models of a rollout. ``reference`` is frozen; ``critic`` and ``score`` may be anything of their shape."""

    policy: PreTrainedModel
    reference: PreTrainedModel
    critic: TokenScorer
    score: Scorer


@dataclass(frozen=True)
class Scored:
    """One pass of policy, reference and critic over a batch; every field (B, T), zeros at masked positions."""

    policy_logprobs: Tensor
    ref_logprobs: Tensor
    full_kl: Tensor
    entropy: Tensor
    values: Tensor


def collect(
    actors: Actors,
    prompt_ids: Sequence[Sequence[int]],
    streams: Sequence[int],
    seed: int,
    sampling: Sampling,
    units: RolloutConfig,
    moments: RunningMeanStd,
    coefficient: float,
    fixed_reference: bool = False,
    seconds: dict[str, float] | None = None,
) -> Experience:
    """Roll out one batch and turn it into experience (algorithms.md §3 to 5), updating ``moments`` in place.

    ``streams`` name the random stream of each prompt; ``coefficient`` is the KL weight of now. ``fixed_reference``
    makes the reference the behaviour policy of the ratio (the paper's importance-sampling ablation). ``seconds``
    receives the time spent by phase. ``RlhfError`` when the sampler and the trainer disagree about probabilities.

    Ranks share the work of sampling and scoring; every rank returns the whole batch, so that everything computed from
    it is global.
    """
    started = time.perf_counter()
    rollout = sample_together(actors.policy, prompt_ids, streams, seed, sampling, units.sampling_batch_size)
    generated = time.perf_counter()
    scored = score_tokens(actors, rollout, sampling, units.micro_batch_size)
    check_sampler(rollout.logprobs, scored.policy_logprobs, rollout.response_mask, actors.policy.dtype)
    scores = actors.score(Tokens(rollout.tokens, rollout.attention_mask, rollout.response_mask))
    # Inference tensors cannot take part in autograd later, so plain copies go on.
    experience = assemble(_plain(rollout), scored, scores, units, moments, coefficient, fixed_reference)
    if seconds is not None:
        seconds["seconds_generation"] = generated - started
        seconds["seconds_forward"] = time.perf_counter() - generated
    return experience


def sample_together(
    policy: PreTrainedModel,
    prompt_ids: Sequence[Sequence[int]],
    streams: Sequence[int],
    seed: int,
    sampling: Sampling,
    at_once: int | None = None,
) -> Rollout:
    """One reply per prompt, each rank sampling its share, at most ``at_once`` prompts at a time.

    A prompt's stream alone decides its draws, so the replies are those of a single process and batch.
    """
    prompts, own_streams = distributed.shard_for_rank(prompt_ids), distributed.shard_for_rank(streams)
    parts = []
    for start in range(0, max(len(prompts), 1), at_once or max(len(prompts), 1)):
        rows = slice(start, start + (at_once or len(prompts)))
        uniforms = philox_uniforms(seed, own_streams[rows], sampling.max_new_tokens)
        parts.append(generate(policy, prompts[rows], uniforms, sampling))
    return gather_rollout(joined(parts, sampling.pad_id), [len(ids) for ids in prompt_ids], sampling.pad_id)


def joined(parts: Sequence[Rollout], pad_id: int) -> Rollout:
    """Rollouts of several batches as one: prompts padded on the left, responses on the right, to the widest."""
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


def gather_rollout(mine: Rollout, prompt_lengths: Sequence[int], pad_id: int) -> Rollout:
    """The shares of all ranks as one rollout: left-padded prompts of ``prompt_lengths``, right-padded responses."""
    if distributed.world_size() == 1:
        return mine
    total, width = len(prompt_lengths), mine.response_mask.shape[1]
    prompt = mine.tokens.shape[1] - width
    missing = max(prompt_lengths) - prompt

    def gathered(values: Tensor, fill: float = 0) -> Tensor:
        return distributed.gather_rows(values, total, fill)

    def prompts(values: Tensor, fill: float) -> Tensor:
        return gathered(torch.nn.functional.pad(values[:, :prompt], (missing, 0), value=fill))

    return Rollout(
        tokens=torch.cat([prompts(mine.tokens, pad_id), gathered(mine.tokens[:, prompt:], pad_id)], dim=1),
        attention_mask=torch.cat([prompts(mine.attention_mask, 0), gathered(mine.attention_mask[:, prompt:])], dim=1),
        response_mask=gathered(mine.response_mask),
        logprobs=gathered(mine.logprobs),
        finished=gathered(mine.finished),
    )


def score_tokens(actors: Actors, rollout: Rollout, sampling: Sampling, micro_batch_size: int | None) -> Scored:
    """Policy, reference and critic over all replies, in micro-batches of similar length that the ranks share."""
    batch = Tokens(rollout.tokens, rollout.attention_mask, rollout.response_mask)
    columns = [torch.zeros(batch.response_mask.shape, device=batch.tokens.device) for _ in range(5)]
    for rows, weight in shared_micro_batches(rollout.attention_mask, micro_batch_size):
        part = batch.part(rows)
        for column, values in zip(columns, _score_part(actors, part, sampling), strict=True):
            if weight:
                column[rows] = pad_columns(torch.where(part.response_mask, values, 0.0).to(column.dtype), batch.width)
    # Each rank has left zeros at the rows of the others.
    return Scored(*(distributed.all_reduce_sum(column) for column in columns))


@torch.inference_mode()
def _score_part(actors: Actors, part: Tokens, sampling: Sampling) -> tuple[Tensor, ...]:
    if isinstance(actors.critic, ActorCritic):
        policy, values = policy_and_values(actors.critic, part, sampling)
    else:
        policy = response_log_distribution(actors.policy, part, sampling)
        values = response_values(actors.critic, part)
    same = actors.reference is actors.policy
    reference = policy if same else response_log_distribution(actors.reference, part, sampling)
    return (
        gather_logprobs(policy, part.response),
        gather_logprobs(reference, part.response),
        full_kl(policy, reference),
        entropy(policy),
        values,
    )


def model_scorer(model: LastTokenModel, micro_batch_size: int | None) -> Scorer:
    """A scorer that reads ``model`` at the last response token of each reply; ranks share the rows."""

    def score(batch: Tokens) -> Tensor:
        scores = torch.zeros(len(batch.tokens), device=batch.tokens.device)
        with torch.inference_mode():
            for rows, weight in shared_micro_batches(batch.attention_mask, micro_batch_size):
                part = batch.part(rows)
                found = model.last_token_scores(part.tokens, part.attention_mask).float()
                if weight:
                    scores[rows] = found
        return distributed.all_reduce_sum(scores)

    return score


def check_sampler(sampler: Tensor, trainer: Tensor, mask: Tensor, dtype: torch.dtype) -> float:
    """Largest difference of log-probabilities between sampler and trainer, which is rho = 1 before any update.

    ``RlhfError`` when it is beyond the rounding of ``dtype``: then PPO's ratios would be wrong from the first step on.
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


def assemble(
    rollout: Rollout,
    scored: Scored,
    scores: Tensor,
    units: RolloutConfig,
    moments: RunningMeanStd,
    coefficient: float,
    fixed_reference: bool = False,
) -> Experience:
    """Rewards, advantages and returns of scored replies, in the order of algorithms.md §4."""
    mask = rollout.response_mask
    moments.update(scores)
    shaped = normalize_and_clip_rewards(scores, moments, units.reward)
    shaped = apply_penalties(shaped, rollout.lengths, rollout.finished, units.reward, units.max_new_tokens)
    kl = kl_estimate(scored.policy_logprobs, scored.ref_logprobs, "k1")
    rewards = token_rewards(shaped, mask, kl, coefficient if units.kl.placement == "reward" else 0.0)
    advantages, returns = gae(rewards, scored.values, mask, units.advantage.gamma, units.advantage.lam)
    return Experience(
        tokens=rollout.tokens,
        attention_mask=rollout.attention_mask,
        response_mask=mask,
        finished=rollout.finished,
        sampler_logprobs=rollout.logprobs,
        policy_logprobs=scored.policy_logprobs,
        old_logprobs=scored.ref_logprobs if fixed_reference else scored.policy_logprobs,
        ref_logprobs=scored.ref_logprobs,
        full_kl=scored.full_kl,
        entropy=scored.entropy,
        values=scored.values,
        scores=scores,
        shaped_scores=shaped,
        token_rewards=rewards,
        advantages=advantages,
        returns=returns,
        monte_carlo=monte_carlo_returns(rewards, mask, units.advantage.gamma),
    )


def _plain(rollout: Rollout) -> Rollout:
    """Copies made outside inference mode."""
    return Rollout(
        rollout.tokens.clone(),
        rollout.attention_mask.clone(),
        rollout.response_mask.clone(),
        rollout.logprobs.clone(),
        rollout.finished.clone(),
    )


def sequence_figures(experience: Experience) -> dict[str, float]:
    """KL and treated reward of a rollout. ``kl_full`` is exact over the vocabulary, in nats per sequence."""
    mask = experience.response_mask
    return {
        "kl_full": float(torch.where(mask, experience.full_kl, 0.0).sum(dim=1).mean()),
        "reward_treated": float(experience.shaped_scores.mean()),
        "sampler_gap": float((experience.sampler_logprobs - experience.policy_logprobs)[mask].abs().max()),
    }
