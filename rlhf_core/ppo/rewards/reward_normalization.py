"""Reward normalisation and clip by running moments (algorithms.md §4; paper, section 5.3.1). Shapes: B sequences."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from rlhf_core.config.stages.ppo import RewardShapingConfig
from rlhf_core.errors import DataError
from rlhf_core.ppo.rewards.reward_scaling import scale_rewards

# Rewards are float32, and equal replies get equal ones only up to the model's accumulation error: about 1e-6 of the
# size of its activations. A spread that small is noise, and dividing by it would turn noise into rewards of size 1.
MIN_RELATIVE_STD = 1e-5


@dataclass
class RunningMeanStd:
    """Mean and standard deviation of all finite rewards seen so far (parallel Welford merge of Chan et al.).

    They begin in critic pre-training and are handed on to PPO with the critic, whose values are in their units.

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
        mean, variance = float(finite.mean()), float(finite.var(unbiased=False))
        total = self.count + size
        delta = mean - self.mean
        merged = self.variance * self.count + variance * size + delta**2 * self.count * size / total
        self.mean += delta * size / total
        self.variance = merged / total
        self.count = total

    @property
    def std(self) -> float:
        """Unbiased standard deviation; 1 while it is undefined or rounding noise (one reward, equal rewards)."""
        if self.count < 2:
            return 1.0
        spread = math.sqrt(self.variance * self.count / (self.count - 1))
        return spread if spread > MIN_RELATIVE_STD * max(1.0, abs(self.mean)) else 1.0

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
            return RunningMeanStd(int(values["count"]), float(values["mean"]), float(values["variance"]))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"reward moments are unreadable ({error}); run the critic stage again") from error


def normalize_and_clip_rewards(rewards: Tensor, moments: RunningMeanStd, config: RewardShapingConfig) -> Tensor:
    """Normalise raw rewards, ``(r - mean) / std``, or scale them, or neither; then clip to +-``clip``: (B,) -> (B,).

    ``moments`` already contain this batch. A reward that is not finite comes out as NaN: the clip must not turn it into
    a plausible one, so that the step is skipped. PPO-max normalises and clips.
    """
    rewards = torch.where(rewards.isfinite(), rewards, math.nan)
    if config.transform == "normalize":
        rewards = (rewards - moments.mean) / moments.std
    elif config.transform == "scale":
        rewards = scale_rewards(rewards, moments.std)
    if config.clip is not None:
        rewards = rewards.clamp(-config.clip, config.clip)
    return rewards
