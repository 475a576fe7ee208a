"""From raw scores to token rewards, in the order of algorithms.md §4. Shapes: B sequences, T response positions."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from rlhf_core.config.ppo import RewardShapingConfig
from rlhf_core.errors import DataError

# Rewards are float32, and equal replies get equal ones only up to the model's accumulation error: about 1e-6 of the
# size of its activations. A spread that small is noise, and dividing by it would turn noise into rewards of size 1.
MIN_RELATIVE_STD = 1e-5


@dataclass
class RunningMeanStd:
    """Mean and spread of all finite scores seen so far (parallel Welford merge of Chan et al.).

    Begins in critic pre-training and is handed to PPO with the critic, because values live in these units.
    ``variance`` is the population variance.
    """

    count: int = 0
    mean: float = 0.0
    variance: float = 0.0

    def update(self, scores: Tensor) -> None:
        """Merge one batch of raw scores (B,). Non-finite scores are left out before the merge."""
        finite = scores.detach().double()
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
        """Unbiased standard deviation; 1 while it is undefined or rounding noise (one score, equal scores)."""
        if self.count < 2:
            return 1.0
        spread = math.sqrt(self.variance * self.count / (self.count - 1))
        return spread if spread > MIN_RELATIVE_STD * max(1.0, abs(self.mean)) else 1.0

    def to_dict(self) -> dict[str, float]:
        """As JSON; floats survive the round trip exactly."""
        return asdict(self)

    @staticmethod
    def from_dict(values: dict[str, float]) -> RunningMeanStd:
        """Back from JSON; ``DataError`` when keys are missing."""
        try:
            return RunningMeanStd(int(values["count"]), float(values["mean"]), float(values["variance"]))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"reward moments are unreadable ({error}); run the critic stage again") from error


def normalize_and_clip_rewards(scores: Tensor, moments: RunningMeanStd, config: RewardShapingConfig) -> Tensor:
    """Scaling ``r / std``, normalisation ``(r - mean) / std`` or neither, then clip to +-``clip``: (B,) -> (B,).

    ``moments`` already contain this batch. A score that is not finite comes out as NaN: the clip must not turn it into
    a plausible reward, so that the step is skipped. Source: paper, section 5.3.1; PPO-max normalises and clips.
    """
    scores = torch.where(scores.isfinite(), scores, math.nan)
    if config.transform == "normalize":
        scores = (scores - moments.mean) / moments.std
    elif config.transform == "scale":
        scores = scores / moments.std
    if config.clip is not None:
        scores = scores.clamp(-config.clip, config.clip)
    return scores


def apply_penalties(
    scores: Tensor, lengths: Tensor, finished: Tensor, config: RewardShapingConfig, max_new_tokens: int
) -> Tensor:
    """Penalties in units of transformed reward: a missing end marker, and length: (B,) -> (B,).

    ``lengths`` (B,) are response tokens, ``finished`` (B,) says whether the reply ends with its end marker.
    """
    missing = (~finished).to(scores.dtype) * config.missing_eos_penalty
    length = lengths.to(scores.dtype) / max_new_tokens * config.length_penalty
    return scores - missing - length


def last_positions(mask: Tensor) -> Tensor:
    """Index of the last response token of each sequence: right-padded (B, T) mask -> (B,)."""
    return mask.sum(dim=1).clamp(min=1) - 1


def token_rewards(scores: Tensor, mask: Tensor, kl: Tensor, coefficient: float) -> Tensor:
    """``R_t = -coefficient * kl_t``, plus the score at the last response token: (B,), (B, T), (B, T) -> (B, T).

    Zero at masked positions. With the KL in the loss, pass a coefficient of 0.
    """
    rewards = torch.where(mask, -coefficient * kl, torch.zeros_like(kl)) if coefficient else torch.zeros_like(kl)
    rows = torch.arange(len(scores), device=rewards.device)
    rewards[rows, last_positions(mask)] += scores.to(rewards.dtype)
    return rewards
