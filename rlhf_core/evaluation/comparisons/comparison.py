"""Win, tie, lose between two sets of replies to the same prompts, with bootstrap intervals over questions.

Length-controlled win rate: what a judge's win rate would be if both replies were equally long.

Dubois et al., 2024, "Length-Controlled AlpacaEval: A Simple Way to Debias Automatic Evaluators". Their regression has a
further term, the difficulty of each instruction. It is fitted over more than a hundred models; one comparison has two
replies to a prompt, which cannot tell a prompt's difficulty from the reply's quality, so it is left out here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import expit

from rlhf_core.data.clusters import CONFIDENCE, cluster_sums, one_each
from rlhf_core.errors import DataError
from rlhf_core.evaluation.judges.model import Judge, require_finite
from rlhf_core.evaluation.replies import Reply
from rlhf_core.evaluation.statistics import bootstrap_bounds, percentile, resample_weights

MOST_RESAMPLES = 500  # each is a regression of its own
NEWTON_STEPS, LONGEST_STEP, TOLERANCE = 100, 2.0, 1e-9


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
) -> dict[str, float]:
    """Return ``lc_win_rate``, the win rate at equal lengths, in [0, 1], with 95 % bounds ``_low95`` and ``_high95``.

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
        return {"lc_win_rate": rate, "lc_win_rate_low95": 0.0, "lc_win_rate_high95": 1.0}
    drawn = resample_weights(count, min(bootstrap, MOST_RESAMPLES), seed)
    resampled = np.concatenate([rates_at_equal_length(won, longer, weights[:, of_row]) for weights in drawn])
    tail = (1 - CONFIDENCE) / 2
    low, high = (float(percentile(resampled, level, count)) for level in (tail, 1 - tail))
    return {"lc_win_rate": rate, "lc_win_rate_low95": low, "lc_win_rate_high95": high}


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


def compare(
    candidate: ArrayLike,
    baseline: ArrayLike,
    tie_margin: float,
    bootstrap: int = 2000,
    seed: int = 0,
    length_difference: ArrayLike | None = None,
    clusters: ArrayLike | None = None,
) -> dict[str, float]:
    """Compare paired scores ``candidate[i]`` and ``baseline[i]`` of the same prompt.

    Several replies to a question are not independent of each other: bounds resample clusters of prompts, each with all
    its replies.

    Args:
        candidate: Scores of one side, (prompts,) or (prompts, replies).
        baseline: Scores of the other side, of the same shape.
        tie_margin: Largest difference that is a tie, in the judge's unit; see :func:`tie_margin_of`.
        bootstrap: Number of resamples.
        seed: Seed of the resamples.
        length_difference: Length of the candidate's minus that of the baseline's reply, of the same shape, for the
            length-controlled win rate; None leaves it out.
        clusters: The cluster of each prompt (prompts,); None: each is one of its own.

    Returns:
        What :func:`compare_outcomes` does, ``mean_difference``, the paired mean of candidate - baseline in the judge's
        unit, with bounds unless all prompts ask the same, and ``tie_margin``.

    Raises:
        DataError: The scores are empty, unequal in number or not finite.
    """
    first, second = np.asarray(candidate, dtype=np.float64), np.asarray(baseline, dtype=np.float64)
    if first.shape != second.shape or first.ndim not in (1, 2):
        raise DataError(f"a comparison needs one score per prompt on both sides, got {first.shape} and {second.shape}")
    if first.size == 0:
        raise DataError("a comparison needs at least one prompt; the test split is empty")
    require_finite(first)
    require_finite(second)
    # One row per prompt, one column per reply to it.
    difference = (first - second).reshape(len(first), -1)
    means = {"mean_difference": difference.mean(axis=1)}
    outcome = outcomes(difference, tie_margin)
    return compare_outcomes(outcome, bootstrap, seed, length_difference, clusters, means) | {"tie_margin": tie_margin}


def compare_outcomes(
    outcome: ArrayLike,
    bootstrap: int = 2000,
    seed: int = 0,
    length_difference: ArrayLike | None = None,
    clusters: ArrayLike | None = None,
    means: Mapping[str, np.ndarray] | None = None,
) -> dict[str, float]:
    """Compare two sides by what a judge without scores said.

    Where each prompt has several pairs of replies, it is won if more of its pairs are won than lost.

    Args:
        outcome: 1 for a win of the candidate, ½ for a tie, 0 for a loss, (prompts,) or (prompts, replies).
        bootstrap: Number of resamples; the same clusters are drawn as in :func:`compare`.
        seed: Seed of the resamples.
        length_difference: See :func:`compare`.
        clusters: See :func:`compare`.
        means: Further values by prompt (prompts,), whose means get bounds over the same resamples.

    Returns:
        ``win``, ``tie`` and ``lose``, shares of prompts; ``win_rate``, the mean over prompts of the share of pairs won,
        ties as half a win; ``prompts``; ``clusters``, how many different questions these are, the unit of every bound
        and test (:mod:`~rlhf_core.evaluation.statistics`); ``clusters_won``, ``_tied`` and ``_lost`` as a whole; with
        lengths ``lc_win_rate``. Names that end in ``low95`` and ``high95`` are bootstrap bounds over clusters.

    Raises:
        DataError: There are no outcomes.
    """
    won = np.asarray(outcome, dtype=np.float64)
    if won.size == 0:
        raise DataError("a comparison needs at least one prompt that was judged")
    won = won.reshape(len(won), -1)
    share_won = won.mean(axis=1)
    means = means or {}
    lows, highs = bootstrap_bounds(np.stack([share_won, *means.values()]), bootstrap, seed, clusters)
    controlled = {}
    if length_difference is not None:
        longer_by = np.asarray(length_difference, dtype=np.float64).reshape(won.shape)
        controlled = length_controlled_win_rate(won, longer_by, bootstrap, seed, clusters)
    sums, sizes = cluster_sums(share_won[np.newaxis], one_each(len(share_won), clusters))
    of_cluster = np.round(sums[0] / sizes - 0.5, 9)
    compared = {
        "win": float((share_won > 0.5).mean()),
        "tie": float((share_won == 0.5).mean()),
        "lose": float((share_won < 0.5).mean()),
        "win_rate": float(share_won.mean()),
        "win_rate_low95": float(max(lows[0], 0.0)),
        "win_rate_high95": float(min(highs[0], 1.0)),
        "prompts": len(share_won),
        "clusters": len(sizes),
        "clusters_won": int((of_cluster > 0).sum()),
        "clusters_tied": int((of_cluster == 0).sum()),
        "clusters_lost": int((of_cluster < 0).sum()),
        **controlled,
    }
    for (name, values), low, high in zip(means.items(), lows[1:], highs[1:], strict=True):
        compared[name] = float(values.mean())
        if np.isfinite(low) and np.isfinite(high):
            compared |= {f"{name}_low95": float(low), f"{name}_high95": float(high)}
    return compared


def compare_groups(
    groups: Sequence[str],
    outcome: Mapping[str, np.ndarray],
    bootstrap: int,
    seed: int,
    clusters: ArrayLike | None = None,
) -> dict[str, dict[str, dict[str, float]]]:
    """Compare two sides within each group of prompts, by each judge.

    Args:
        groups: The group of each prompt, such as its category; prompts of "" are in none.
        outcome: By judge 1 for a win, ½ for a tie, 0 for a loss, NaN where it did not decide (prompts, replies).
        bootstrap: Number of resamples.
        seed: Seed of the resamples.
        clusters: See :func:`compare`.

    Returns:
        Comparisons by group and judge; a judge that decided on no prompt of a group is left out.
    """
    of_prompt = one_each(len(groups), clusters)
    table: dict[str, dict[str, dict[str, float]]] = {}
    for group in sorted(set(groups) - {""}):
        in_group = np.array([name == group for name in groups])
        table[group] = {}
        for judge, values in outcome.items():
            known = in_group & ~np.isnan(values).any(axis=1)
            if known.any():
                table[group][judge] = compare_outcomes(values[known], bootstrap, seed, clusters=of_prompt[known])
    return table


def tie_margin_of(judge: Judge, share: float, baseline: Sequence[float]) -> float:
    """Largest difference of ``judge``'s scores that is a tie.

    The judge's own margin where it has one, else ``share`` times the standard deviation of its ``baseline`` scores.
    The candidate has no part in it: a policy whose scores spread wider would turn its own losses into ties.
    """
    return judge.absolute_tie if judge.absolute_tie is not None else share * float(np.std(baseline))


def outcomes(difference: np.ndarray, margin: float) -> np.ndarray:
    """1 for a win, ½ for a tie (``|difference| <= margin``), 0 for a loss; in the shape of ``difference``."""
    return np.where(np.abs(difference) <= margin, 0.5, (difference > 0).astype(np.float64))
