"""Advantages of a rollout, their normalisation and clip (algorithms.md §5).

With a critic: generalised advantage estimation. Without: the replies to one prompt are compared
with each other. They follow one another in a rollout, on every rank, since every rank holds the
whole rollout. Normalisation and clip are off in PPO-max, which constrains rewards instead (paper,
section 5.3.1).

Shapes: B sequences, T response positions, P prompts, K replies to each (B = P * K).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rlhf_core.config.ppo import AdvantageConfig
from rlhf_core.ppo.experience import Experience
from rlhf_core.ppo.losses import masked_mean, sequence_sums

STD_EPSILON = 1e-4  # keeps rounding between equal rewards from becoming an advantage
EQUAL_REWARDS = 1e-6  # raw rewards within this are equal: identical replies may differ by rounding


def estimate_advantages(
    experience: Experience, config: AdvantageConfig, replies_per_prompt: int
) -> Experience:
    """Add advantages to a rollout that has token rewards, and with GAE the critic's targets."""
    if config.critic_free:
        return with_group_advantages(experience, config, replies_per_prompt)
    return with_advantages(experience, config)


def with_advantages(experience: Experience, config: AdvantageConfig) -> Experience:
    """Add advantages, the critic's targets and Monte Carlo returns to a rewarded rollout."""
    rewards = experience.token_rewards
    mask = experience.response_mask
    advantages, returns = gae(rewards, experience.values, mask, config.gamma, config.lam)
    monte_carlo = monte_carlo_returns(rewards, mask, config.gamma)
    return replace(
        experience, advantages=advantages, returns=returns, monte_carlo_returns=monte_carlo
    )


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Estimate advantages (Schulman et al. 2016).

    Shapes: (B, T) three times -> advantages, returns, both (B, T).

    ``delta_t = R_t + gamma * V_{t+1} - V_t`` with V past the end 0,
    ``A_t = delta_t + gamma * lam * A_{t+1}``, ``returns = A + V`` with A as it is here,
    unnormalised. Masked positions never leak in; they come out as 0.
    """
    device = values.device
    # On the CPU: a GPU would launch six kernels for each token, to do next to nothing.
    rewards = rewards.cpu()
    values = values.cpu()
    mask = mask.cpu()
    values = torch.where(mask, values, 0)
    rewards = torch.where(mask, rewards, 0)
    advantages = torch.zeros_like(values)
    following_value = values.new_zeros(len(values))
    following_advantage = following_value
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * following_value - values[:, t]
        # Past the end every term is zero, so no mask is needed inside the recursion.
        following_advantage = delta + gamma * lam * following_advantage
        advantages[:, t] = following_advantage
        following_value = values[:, t]
    return advantages.to(device), (advantages + values).to(device)


def monte_carlo_returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Discounted reward-to-go, free of any critic: (B, T) -> (B, T).

    Explained variance is measured against it.
    """
    return gae(rewards, torch.zeros_like(rewards), mask, gamma, 1.0)[1]


def explained_variance(values: Tensor, targets: Tensor, mask: Tensor) -> float:
    """``1 - Var(targets - values) / Var(targets)`` over response tokens.

    0 where the targets do not vary.
    """
    values = values[mask].double()
    targets = targets[mask].double()
    if targets.numel() < 2:
        return 0.0
    spread = float(targets.var(unbiased=False))
    if not spread > 1e-12:
        return 0.0
    unexplained = float((targets - values).var(unbiased=False))
    return 1.0 - unexplained / spread


def with_group_advantages(
    experience: Experience, config: AdvantageConfig, replies_per_prompt: int
) -> Experience:
    """Add advantages to a rollout that has token rewards: one number for all tokens of a reply.

    Values, returns and Monte Carlo returns stay NaN.
    """
    groups = grouped_rewards(experience, replies_per_prompt)
    scored = experience.rewarded.view(-1, replies_per_prompt)
    if not bool(scored.all()):
        advantages = advantages_of_scored(groups, scored, config)
    elif config.estimator == "rloo":
        advantages = leave_one_out_advantages(groups)
    else:
        advantages = group_relative_advantages(groups, config.divide_by_std)
    per_token = advantages.view(-1, 1).expand_as(experience.token_rewards)
    of_response = torch.where(experience.response_mask, per_token, 0)
    return replace(experience, advantages=of_response)


def grouped_rewards(experience: Experience, replies_per_prompt: int) -> Tensor:
    """What each reply is worth (P, K).

    It is the shaped reward, less the KL penalty where that is placed in the reward.
    """
    worth = sequence_sums(experience.token_rewards, experience.response_mask)
    return worth.view(-1, replies_per_prompt)


def leave_one_out_advantages(rewards: Tensor) -> Tensor:
    """``A_i = R_i - mean of R_j over j != i``: (P, K) -> (P, K).

    REINFORCE leave-one-out (RLOO): the baseline of a reply is independent of it, so that the policy
    gradient stays
    unbiased. Sources: Ahmadian et al. 2024, "Back to Basics: Revisiting REINFORCE Style
    Optimization for Learning from Human Feedback in LLMs"; the estimator is that of Kool et al.
    2019.
    """
    replies = rewards.shape[1]
    of_others = rewards.sum(dim=1, keepdim=True) - rewards
    baseline = of_others / (replies - 1)
    return rewards - baseline


def group_relative_advantages(rewards: Tensor, divide_by_std: bool) -> Tensor:
    """``A_i = (R_i - mean R) / (std R + 1e-4)``, or without the division ``R_i - mean R``.

    Shapes: (P, K) -> (P, K).

    Sources: Shao et al. 2024, "DeepSeekMath", section 4.1 (GRPO); without the division Liu et al.
    2025, "Understanding R1-Zero-Like Training" (Dr. GRPO). The standard deviation is the sample's
    (over K - 1). Dividing by it gives prompts with little difference between their replies, very
    easy or very hard ones, as much weight as the others.
    """
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    if divide_by_std:
        return centred / (rewards.std(dim=1, keepdim=True) + STD_EPSILON)
    return centred


def advantages_of_scored(rewards: Tensor, scored: Tensor, config: AdvantageConfig) -> Tensor:
    """The same advantages where only some replies to a prompt could be scored.

    Shapes: (P, K) twice -> (P, K).

    Others take no part in baseline and spread, and have 0, as has the only one of its prompt that
    was scored.
    """
    count = scored.sum(dim=1, keepdim=True)
    total = torch.where(scored, rewards, 0.0).sum(dim=1, keepdim=True)
    mean = total / count.clamp(min=1)
    centred = torch.where(scored, rewards - mean, 0.0)
    others = (count - 1).clamp(min=1)
    if config.estimator == "rloo":
        return centred * count / others  # r - mean of the others = (r - mean of all) * n / (n - 1)
    if not config.divide_by_std:
        return centred
    variance = centred.square().sum(dim=1, keepdim=True) / others
    std = variance.sqrt()
    return centred / (std + STD_EPSILON)


def group_metrics(experience: Experience, replies_per_prompt: int) -> dict[str, float]:
    """Measure how far the replies to a prompt differ in reward.

    That is all that a critic-free update learns from.

    Returns:
        ``group_reward_std``, the mean over prompts of the standard deviation of what their replies
        are worth, and ``equal_reward_groups``, the share of prompts whose replies all have the same
        raw reward. Prompts of which a reply could not be scored do not count.
    """
    whole = experience.rewarded.view(-1, replies_per_prompt).all(dim=1)
    if not bool(whole.any()):
        return {}
    raw = experience.rewards.view(-1, replies_per_prompt)[whole]
    equal = raw.amax(dim=1) - raw.amin(dim=1) <= EQUAL_REWARDS
    spread = grouped_rewards(experience, replies_per_prompt)[whole].double().std(dim=1)
    return {
        "group_reward_std": float(spread.mean()),
        "equal_reward_groups": float(equal.double().mean()),
    }


def normalize_and_clip_advantages(
    advantages: Tensor, mask: Tensor, config: AdvantageConfig
) -> Tensor:
    """Normalise over the minibatch, then clip to +-``clip``.

    Each is a switch of its own: (B, T) -> (B, T).
    """
    if config.normalize:
        advantages = masked_whiten(advantages, mask)
    if config.clip is not None:
        advantages = advantages.clamp(-config.clip, config.clip)
    return advantages


def masked_whiten(values: Tensor, mask: Tensor) -> Tensor:
    """``(x - mean) / sqrt(population variance + 1e-8)`` over response tokens only.

    Shapes: (B, T) -> (B, T).

    The mean stays removed, and padding takes no part; masked positions come out as 0.
    """
    mean = masked_mean(values, mask)
    variance = masked_mean((values - mean).square(), mask)
    whitened = (values - mean) * torch.rsqrt(variance + 1e-8)
    return torch.where(mask, whitened, 0)
