"""KL to the reference policy: its estimators, and the controller of its coefficient.

See algorithms.md §4.5.

The penalty itself is applied in the token rewards (``rewards.py``) or in the policy's loss
(``losses.py``). The exact KL over the vocabulary is computed with the log-probabilities
(``sampling/token_scoring.py``).

Shapes: B sequences, T response positions. All divergences are in nats.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from rlhf_core.config.ppo import KL_ERROR_CLIP, KlConfig

SampledEstimator = Literal["k1", "k2", "k3"]
MIN_FACTOR = 0.1  # one rollout lowers an adaptive coefficient to a tenth at most, so that it can never turn negative


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: SampledEstimator) -> Tensor:
    """Per-token estimate of KL(policy || reference) from sampled tokens, (B, T) -> (B, T).

    With d = log p - log q: ``k1`` d (unbiased, signed), ``k2`` d^2/2 (biased), ``k3`` exp(-d) - 1 +
    d (unbiased, never negative). Source: Schulman, "Approximating KL divergence" (2020).
    """
    difference = logprobs - ref_logprobs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    return torch.expm1(-difference) + difference


class KlController:
    """Coefficient of the KL penalty: constant, or steered to a target.

    Adaptive form of Ziegler et al. (2019):
    ``beta <- beta * (1 + clip(KL/target - 1, -0.2, 0.2) * sequences/horizon)``, with the factor
    floored at 0.1. A KL that is not finite leaves the coefficient as it is.
    """

    def __init__(self, config: KlConfig) -> None:
        self.config = config
        self.value = config.coefficient

    def update(self, kl_per_sequence: float, sequences: int) -> None:
        """Adapt the coefficient to the mean KL of one rollout.

        The KL is in nats per sequence, of ``sequences`` replies.
        """
        if self.config.controller == "constant" or not math.isfinite(kl_per_sequence):
            return
        error = min(max(kl_per_sequence / self.config.target - 1, -KL_ERROR_CLIP), KL_ERROR_CLIP)
        self.value *= max(1 + error * sequences / self.config.horizon, MIN_FACTOR)


def kl_pull(treated_scores: Tensor, coefficient: float) -> float:
    """What one nat of drift costs, in standard deviations of the treated scores, (B,): β / SD.

    NaN where all scores are equal, since there is nothing then that the penalty could be weighed
    against.
    """
    spread = float(treated_scores.std(correction=0))
    return coefficient / spread if spread > 0 else math.nan
