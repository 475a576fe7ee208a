"""From raw rewards to token rewards, in the order of algorithms.md §4 (paper, section 5.3.1).

Raw rewards are normalised or scaled by running moments, clipped, and penalised for a missing end
and for length; the KL penalty is then spread over the tokens. Shapes: B sequences, T response
positions.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from rlhf_core.config.ppo import RewardShapingConfig, RolloutConfig
from rlhf_core.errors import DataError
from rlhf_core.ppo.experience import Experience
from rlhf_core.ppo.kl import kl_estimate

# Rewards are float32, and equal replies get equal ones only up to the model's accumulation error:
# about 1e-6 of the size of its activations. A spread that small is noise, and dividing by it would
# turn noise into rewards of size 1.
MIN_RELATIVE_STD = 1e-5


@dataclass
class RunningMeanStd:
    """Mean and standard deviation of all finite rewards seen so far.

    Batches are merged as Chan et al. do (parallel Welford).

    They begin in critic pre-training and are handed on to PPO with the critic, whose values are in
    their units.

    Attributes:
        count: Number of rewards.
        mean: Their mean.
        variance: Their population variance.
    """

    count: int = 0
    mean: float = 0.0
    variance: float = 0.0

    def update(self, rewards: Tensor) -> None:
        """Merge one batch of raw rewards (B,). Rewards that are not finite are left out."""
        finite = rewards.detach().double()
        finite = finite[torch.isfinite(finite)]
        size = finite.numel()
        if size == 0:
            return
        mean = float(finite.mean())
        variance = float(finite.var(unbiased=False))
        total = self.count + size
        delta = mean - self.mean
        merged = self.variance * self.count + variance * size + delta**2 * self.count * size / total
        self.mean += delta * size / total
        self.variance = merged / total
        self.count = total

    @property
    def std(self) -> float:
        """Unbiased standard deviation.

        1 while it is undefined or rounding noise (one reward, equal rewards).
        """
        if self.count < 2:
            return 1.0
        spread = math.sqrt(self.variance * self.count / (self.count - 1))
        if spread > MIN_RELATIVE_STD * max(1.0, abs(self.mean)):
            return spread
        return 1.0

    @property
    def constant(self) -> bool:
        """Whether all rewards so far were the same, up to rounding."""
        return self.count >= 2 and math.sqrt(self.variance) <= MIN_RELATIVE_STD * max(
            1.0, abs(self.mean)
        )

    def to_dict(self) -> dict[str, float]:
        """Return the moments as JSON; floats survive the round trip exactly."""
        return asdict(self)

    @staticmethod
    def from_dict(values: dict[str, float]) -> RunningMeanStd:
        """Undo :meth:`to_dict`.

        Raises:
            DataError: Keys are missing.
        """
        try:
            return RunningMeanStd(
                int(values["count"]), float(values["mean"]), float(values["variance"])
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"reward moments are unreadable ({error}); pre-train the critic again"
            ) from error


def normalize_and_clip_rewards(
    rewards: Tensor, moments: RunningMeanStd, config: RewardShapingConfig
) -> Tensor:
    """Normalise raw rewards, ``(r - mean) / std``, or scale them, or neither.

    Then clip to +-``clip``: (B,) -> (B,).

    ``moments`` already contain this batch. A reward that is not finite comes out as NaN: the clip
    must not turn it into a plausible one, so that the step is skipped. PPO-max normalises and
    clips.
    """
    rewards = torch.where(rewards.isfinite(), rewards, math.nan)
    if config.transform == "normalize":
        rewards = (rewards - moments.mean) / moments.std
    elif config.transform == "scale":
        rewards = scale_rewards(rewards, moments.std)
    if config.clip is not None:
        rewards = rewards.clamp(-config.clip, config.clip)
    return rewards


def scale_rewards(rewards: Tensor, std: float) -> Tensor:
    """``r / std`` with the running standard deviation of raw rewards.

    The mean stays where it is: (B,) -> (B,).

    The trick comes from continuous control, where the rolling discounted sum of rewards is scaled
    (Engstrom et al. 2020). With one reward at the end of a reply and no discount that sum is the
    reward itself.
    """
    return rewards / std


def with_rewards(
    experience: Experience,
    rewards: Tensor,
    moments: RunningMeanStd,
    kl_coef: float,
    config: RolloutConfig,
    unscored: Tensor | None = None,
) -> Experience:
    """Add raw, shaped and token rewards to a rollout.

    Args:
        experience: The rollout.
        rewards: Raw rewards (B,).
        moments: Running moments of raw rewards, those of this rollout included.
        kl_coef: Weight of the KL penalty, if ``config`` places it in the reward.
        config: The reward's transform, clip and penalties.
        unscored: Which replies the reward function could not score (B,); None for none. They keep a
            place in the rollout with a shaped reward of 0, and nothing is learned from them.
    """
    shaped = normalize_and_clip_rewards(rewards, moments, config.reward)
    rewarded = experience.rewarded if unscored is None else ~unscored
    if unscored is not None:
        shaped = torch.where(unscored, 0.0, shaped)
    shaped = apply_penalties(
        shaped, experience.lengths, experience.finished, config.reward, config.max_new_tokens
    )
    kl = kl_estimate(experience.policy_logprobs, experience.ref_logprobs, "k1")
    kl_coef = kl_coef if config.kl.placement == "reward" else 0.0
    per_token = token_rewards(shaped, experience.response_mask, kl, kl_coef)
    return replace(
        experience,
        rewards=rewards,
        rewarded=rewarded,
        shaped_rewards=shaped,
        token_rewards=per_token,
    )


def apply_penalties(
    rewards: Tensor,
    lengths: Tensor,
    finished: Tensor,
    config: RewardShapingConfig,
    max_new_tokens: int,
) -> Tensor:
    """Subtract the penalties for a missing end marker and for length, in units of shaped reward.

    Shapes: (B,) -> (B,).

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
    """``R_t = -kl_coef * kl_t``, plus the reward at the last response token.

    Shapes: (B,), (B, T), (B, T) -> (B, T).

    Zero at masked positions. With the KL in the loss, pass a coefficient of 0.
    """
    per_token = torch.zeros_like(kl)
    if kl_coef:
        per_token = torch.where(mask, -kl_coef * kl, per_token)
    rows = torch.arange(len(rewards), device=per_token.device)
    last = mask.sum(dim=1).clamp(min=1) - 1
    per_token[rows, last] += rewards.to(per_token.dtype)
    return per_token
