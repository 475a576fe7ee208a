"""Length-controlled win rate: what a judge's win rate would be if both replies were equally long.

Dubois et al., 2024, "Length-Controlled AlpacaEval: A Simple Way to Debias Automatic Evaluators". Their regression has a
further term, the difficulty of each instruction. It is fitted over more than a hundred models; one comparison has two
replies to a prompt, which cannot tell a prompt's difficulty from the reply's quality, so it is left out here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats
from scipy.special import expit

from rlhf_core.evaluation.replies.reply import Reply

# Each resample is a regression of its own, of one to three milliseconds.
MOST_RESAMPLES = 500


@dataclass(frozen=True)
class LengthControlledWinRate:
    """The win rate at equal lengths, in [0, 1], with 95 % percentile-bootstrap bounds over prompts."""

    lc_win_rate: float
    lc_win_rate_low95: float
    lc_win_rate_high95: float


def length_differences(candidate: Sequence[Reply], baseline: Sequence[Reply]) -> np.ndarray:
    """Characters of each candidate reply minus those of the baseline's, (n,).

    Characters, as in the paper, and not tokens: the two models of a match may have different tokenizers.
    """
    return np.array([len(a.text) - len(b.text) for a, b in zip(candidate, baseline, strict=True)], dtype=np.float64)


def length_controlled_win_rate(
    outcome: np.ndarray, length_difference: np.ndarray, bootstrap: int, seed: int
) -> LengthControlledWinRate:
    """Control the win rate of a comparison for length.

    Args:
        outcome: 1 for a win of the candidate, ½ for a tie, 0 for a loss, (prompts, replies).
        length_difference: Length of the candidate's minus that of the baseline's reply, (prompts, replies).
        bootstrap: Number of resamples; at most 500 are drawn.
        seed: Seed of the resamples. Those of the plain win rate with this seed begin with the same prompts.
    """
    spread = float(length_difference.std())
    # Of a constant difference no regression can tell the effect from the candidate's quality.
    feature = np.tanh(length_difference / spread) if spread > 0 else np.zeros_like(outcome)

    def rate_of(rows: np.ndarray) -> float:
        return rate_at_equal_length(outcome[rows].ravel(), feature[rows].ravel())

    rows = np.arange(len(outcome))
    rate = rate_of(rows)
    if len(rows) == 1:
        return LengthControlledWinRate(rate, rate, rate)
    interval = stats.bootstrap(
        (rows,),
        rate_of,
        method="percentile",
        n_resamples=min(bootstrap, MOST_RESAMPLES),
        vectorized=False,
        rng=np.random.Generator(np.random.Philox(key=seed)),
    ).confidence_interval
    return LengthControlledWinRate(rate, float(interval.low), float(interval.high))


def rate_at_equal_length(outcome: np.ndarray, feature: np.ndarray) -> float:
    """Fit ``P(win) = σ(θ + φ · feature)`` and return ``σ(θ)``; a tie is half a win and half a loss.

    φ has scikit-learn's default L2 penalty, ½φ², which is weak beside some hundred prompts (the paper penalises it
    too): it keeps φ finite where length alone decides who wins. θ has none, so that a constant feature leaves the plain
    win rate.

    Args:
        outcome: Shares of a win (n,).
        feature: ``tanh`` of the standardised length difference (n,); 0 where lengths are equal.
    """
    import sklearn
    from sklearn.linear_model import LogisticRegression

    rate = float(outcome.mean())
    if rate in (0.0, 1.0) or not feature.any():
        # Without a loss, or without a win, θ has no finite value.
        return rate
    regression = LogisticRegression(tol=1e-7, max_iter=1000)
    rows = np.concatenate([feature, feature])[:, np.newaxis]
    won = np.repeat([1, 0], len(outcome))
    # The checks of inputs and parameters take longer than the fit, which a bootstrap repeats thousands of times.
    with sklearn.config_context(assume_finite=True, skip_parameter_validation=True):
        regression.fit(rows, won, sample_weight=np.concatenate([outcome, 1.0 - outcome]))
    return float(expit(regression.intercept_[0]))
