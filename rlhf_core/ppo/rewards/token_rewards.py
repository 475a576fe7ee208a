"""From raw rewards to token rewards, in the order of algorithms.md §4. Shapes: B sequences, T response positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from rlhf_core.config.stages.ppo import RewardShapingConfig, RolloutConfig
from rlhf_core.models.heads.scalar import ReplyScorer
from rlhf_core.ppo.experience import Experience
from rlhf_core.ppo.rewards.kl import kl_estimate
from rlhf_core.ppo.rewards.reward_normalization import RunningMeanStd, normalize_and_clip_rewards
from rlhf_core.runtime import distributed
from rlhf_core.sampling.micro_batches import MicroBatchLimits
from rlhf_core.sampling.token_scoring import Tokens
from rlhf_core.training.side_by_side import run_side_by_side

RewardFn = Callable[[Tokens], Tensor]  # the raw reward of every reply (B,)


def reward_model_fn(
    model: ReplyScorer, micro_batch_size: int | None, micro_batch_tokens: int | None = None
) -> RewardFn:
    """Make a reward function of a model that scores replies; ranks share the rows.

    Args:
        model: The reward model.
        micro_batch_size: Sequences of one pass; None for the default.
        micro_batch_tokens: Positions of one pass; None for no such bound.
    """
    limits = MicroBatchLimits(micro_batch_size, micro_batch_tokens)

    def reward_fn(batch: Tokens) -> Tensor:
        rewards = torch.zeros(len(batch.tokens), device=batch.tokens.device)
        parts = list(limits.split(batch))
        scores = run_side_by_side(*(partial(_reply_scores, model, micro.tokens) for micro in parts), models=[model])
        for micro, part_rewards in zip(parts, scores, strict=True):
            if micro.weight:
                rewards[micro.rows] = part_rewards
        return distributed.all_reduce_sum(rewards)

    return reward_fn


@torch.inference_mode()
def _reply_scores(model: ReplyScorer, part: Tokens) -> Tensor:
    return model.reply_scores(part.tokens, part.attention_mask, part.reply_mask).float()


def reward_metrics(reward_fn: RewardFn) -> dict[str, float]:
    """Metrics about the newest batch, of a reward function that has an attribute ``metrics``; none of another."""
    return dict(getattr(reward_fn, "metrics", {}))


def with_rewards(
    experience: Experience, rewards: Tensor, moments: RunningMeanStd, kl_coef: float, config: RolloutConfig
) -> Experience:
    """Add raw, shaped and token rewards to a rollout.

    Args:
        experience: The rollout.
        rewards: Raw rewards (B,).
        moments: Running moments of raw rewards, those of this rollout included.
        kl_coef: Weight of the KL penalty, if ``config`` places it in the reward.
        config: The reward's transform, clip and penalties.
    """
    shaped = normalize_and_clip_rewards(rewards, moments, config.reward)
    shaped = apply_penalties(shaped, experience.lengths, experience.finished, config.reward, config.max_new_tokens)
    kl = kl_estimate(experience.policy_logprobs, experience.ref_logprobs, "k1")
    kl_coef = kl_coef if config.kl.placement == "reward" else 0.0
    per_token = token_rewards(shaped, experience.response_mask, kl, kl_coef)
    return replace(experience, rewards=rewards, shaped_rewards=shaped, token_rewards=per_token)


def apply_penalties(
    rewards: Tensor, lengths: Tensor, finished: Tensor, config: RewardShapingConfig, max_new_tokens: int
) -> Tensor:
    """Subtract the penalties for a missing end marker and for length, in units of shaped reward: (B,) -> (B,).

    Args:
        rewards: Normalised and clipped rewards (B,).
        lengths: Response tokens of each reply (B,).
        finished: Whether each reply ends with its end marker (B,).
        config: The penalties.
        max_new_tokens: Length that costs the whole length penalty.
    """
    missing = (~finished).to(rewards.dtype) * config.missing_eos_penalty
    length = lengths.to(rewards.dtype) / max_new_tokens * config.length_penalty
    return rewards - missing - length


def token_rewards(rewards: Tensor, mask: Tensor, kl: Tensor, kl_coef: float) -> Tensor:
    """``R_t = -kl_coef * kl_t``, plus the reward at the last response token: (B,), (B, T), (B, T) -> (B, T).

    Zero at masked positions. With the KL in the loss, pass a coefficient of 0.
    """
    per_token = torch.where(mask, -kl_coef * kl, torch.zeros_like(kl)) if kl_coef else torch.zeros_like(kl)
    rows = torch.arange(len(rewards), device=per_token.device)
    per_token[rows, last_positions(mask)] += rewards.to(per_token.dtype)
    return per_token


def last_positions(mask: Tensor) -> Tensor:
    """Index of the last response token of each sequence: right-padded (B, T) mask -> (B,)."""
    return mask.sum(dim=1).clamp(min=1) - 1
