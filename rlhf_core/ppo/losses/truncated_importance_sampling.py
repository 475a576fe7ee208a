"""Truncated importance sampling (TIS) between sampler and trainer, two policies where their rounding differs.

The replies come from the sampler's distribution ``mu``, while PPO's gradient takes them for samples of the trainer's
``pi_old``. The weight ``w = min(pi_old / mu, C)`` of each token corrects the policy's loss for that; the cap C bounds
the variance. It is a constant of the loss, not differentiated, and has nothing to do with the ratio ``pi / pi_old``
that is clipped. Source: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training".
Shapes: B sequences, T response positions.
"""

from __future__ import annotations

from torch import Tensor

from rlhf_core.config.stages.ppo import ImportanceSamplingCorrectionConfig
from rlhf_core.models.precision import Precision
from rlhf_core.ppo.losses.importance_sampling import ratios


def truncated_weights(trainer: Tensor, sampler: Tensor, mask: Tensor, cap: float) -> Tensor:
    """``min(exp(log pi_old - log mu), C)`` at response tokens, 1 elsewhere: (B, T) -> (B, T), without gradient.

    Args:
        trainer: The trainer's log-probabilities of the sampled tokens before the update, ``log pi_old``.
        sampler: The sampler's, ``log mu``.
        mask: Response tokens.
        cap: C.
    """
    return ratios(trainer.detach(), sampler.detach(), mask).clamp(max=cap)


def correction_cap(config: ImportanceSamplingCorrectionConfig, precision: Precision) -> float | None:
    """The cap of this run's weights, or None where the loss is not corrected.

    In mode ``auto`` float32 and float64 runs are not: there sampler and trainer agree up to the last digits.
    """
    exact = precision in ("float32", "float64")
    return None if config.mode == "never" or (config.mode == "auto" and exact) else config.cap
