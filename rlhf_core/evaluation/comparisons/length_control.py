"""Length-controlled win rate: what a judge's win rate would be if both replies were equally long.

Dubois et al., 2024, "Length-Controlled AlpacaEval: A Simple Way to Debias Automatic Evaluators". Their regression has a
further term, the difficulty of each instruction. It is fitted over more than a hundred models; one comparison has two
replies to a prompt, which cannot tell a prompt's difficulty from the reply's quality, so it is left out here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import expit

from rlhf_core.evaluation.replies.reply import Reply
from rlhf_core.evaluation.statistics import CONFIDENCE, one_each, percentile, resample_weights

MOST_RESAMPLES = 500  # each is a regression of its own
NEWTON_STEPS, LONGEST_STEP, TOLERANCE = 100, 2.0, 1e-9


@dataclass(frozen=True)
class LengthControlledWinRate:
    """The win rate at equal lengths, in [0, 1], with 95 % bootstrap bounds over clusters of prompts."""

    lc_win_rate: float
    lc_win_rate_low95: float
    lc_win_rate_high95: float


def length_differences(candidate: Sequence[Reply], baseline: Sequence[Reply]) -> np.ndarray:
    """Characters of each candidate reply minus those of the baseline's, (n,).

    Characters, as in the paper, and not tokens: the two models of a match may have different tokenizers.
    """
    return np.array([len(a.text) - len(b.text) for a, b in zip(candidate, baseline, strict=True)], dtype=np.float64)


def length_controlled_win_rate(
    outcome: np.ndarray,
    length_difference: np.ndarray,
    bootstrap: int,
    seed: int,
    clusters: ArrayLike | None = None,
) -> LengthControlledWinRate:
    """Control the win rate of a comparison for length.

    Args:
        outcome: 1 for a win of the candidate, ½ for a tie, 0 for a loss, (prompts, replies).
        length_difference: Length of the candidate's minus that of the baseline's reply, (prompts, replies).
        bootstrap: Number of resamples; at most 500 are drawn.
        seed: Seed of the resamples.
        clusters: The cluster of each prompt, which are resampled; None: each is one of its own.
    """
    spread = float(length_difference.std())
    # Of a constant difference no regression can tell the effect from the candidate's quality.
    feature = np.tanh(length_difference / spread) if spread > 0 else np.zeros_like(outcome)
    replies = outcome.size // len(outcome)
    _, of_row = np.unique(np.repeat(one_each(len(outcome), clusters), replies), return_inverse=True)
    count = int(of_row.max()) + 1
    won, longer = outcome.ravel(), feature.ravel()
    rate = float(rates_at_equal_length(won, longer, np.ones((1, len(won))))[0])
    if count < 2:
        return LengthControlledWinRate(rate, 0.0, 1.0)
    drawn = resample_weights(count, min(bootstrap, MOST_RESAMPLES), seed)
    resampled = np.concatenate([rates_at_equal_length(won, longer, weights[:, of_row]) for weights in drawn])
    tail = (1 - CONFIDENCE) / 2
    low, high = (float(percentile(resampled, level, count)) for level in (tail, 1 - tail))
    return LengthControlledWinRate(rate, low, high)


def rates_at_equal_length(outcome: np.ndarray, feature: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Fit ``P(win) = σ(θ + φ · feature)`` for each set of weights and return its ``σ(θ)``, (sets,).

    A tie is half a win and half a loss. φ has the penalty ½φ², which is weak beside some hundred prompts (the paper
    penalises it too): it keeps φ finite where length alone decides who wins. θ has none, so that a constant feature
    leaves the plain win rate.

    Args:
        outcome: Shares of a win (n,).
        feature: ``tanh`` of the standardised length difference (n,); 0 where lengths are equal.
        weights: How often each row counts, (sets, n).
    """
    totals = weights.sum(axis=1)
    plain = weights @ outcome / totals
    # Without a loss, or without a win, θ has no finite value.
    decided = (plain <= 0) | (plain >= 1)
    if not feature.any() or decided.all():
        return plain
    theta, phi = np.zeros(len(weights)), np.zeros(len(weights))
    for _ in range(NEWTON_STEPS):
        share = expit(theta[:, np.newaxis] + phi[:, np.newaxis] * feature)
        residual, curvature = weights * (share - outcome), weights * share * (1 - share)
        slope_theta, slope_phi = residual.sum(axis=1), residual @ feature + phi
        aa, ab, bb = curvature.sum(axis=1) + 1e-12, curvature @ feature, curvature @ feature**2 + 1
        determinant = aa * bb - ab**2
        step_theta = (bb * slope_theta - ab * slope_phi) / determinant
        step_phi = (aa * slope_phi - ab * slope_theta) / determinant
        # A full step from far away would overshoot; the loss is convex, so short ones arrive.
        shrink = np.minimum(1.0, LONGEST_STEP / np.maximum(np.hypot(step_theta, step_phi), 1e-300))
        theta -= shrink * step_theta
        phi -= shrink * step_phi
        if np.abs(np.where(decided, 0.0, step_theta)).max() < TOLERANCE:
            break
    return np.where(decided, plain, expit(theta))
