"""Win, tie, lose between two sets of replies to the same prompts, with intervals over questions.

Length-controlled win rate: what a judge's win rate would be if both replies were equally long. The
regression is that of Dubois et al., 2024, "Length-Controlled AlpacaEval: A Simple Way to Debias
Automatic Evaluators", on pairs that are weighted so that the candidate's reply is longer as often
as it is shorter, by as much. Without these weights a policy passes that only appends a sentence:
where the longer reply is nearly always the same side's, the regression cannot tell length from
quality, and what it says is its penalty. With them, a judge that errs for the longer reply errs as
much for either side, whatever the form of its bias: between equal models the rate is ½. Where one
side's replies are longer throughout, there is nothing to compare, and nothing is decided.

The paper's regression has a further term, the difficulty of each instruction. It is fitted over
more than a hundred models; one comparison has two replies to a prompt, which cannot tell a prompt's
difficulty from the reply's quality, so it is left out here.

Both models get the same random numbers where this pipeline samples for them (coupled draws). Win
rates are then of replies that were drawn with the same luck, many of them equal and so ties. Of
replies that are drawn independently of each other, other shares are won.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import expit

from rlhf_core.data.statistics import CONFIDENCE, cluster_sums, one_each
from rlhf_core.errors import DataError
from rlhf_core.evaluation.judges.model import Judge, require_finite
from rlhf_core.evaluation.replies import Reply
from rlhf_core.evaluation.statistics import (
    bootstrap_bounds,
    percentile,
    resample_weights,
    win_rate_score_bounds,
)

MOST_RESAMPLES = 500  # each is a regression of its own
NEWTON_STEPS = 100
LONGEST_STEP = 2.0
TOLERANCE = 1e-9
# Pairs of the rarer sign of the length difference in a cell. More of them mix differences that are
# less equal: a policy that appends a sentence to unchanged replies then passes by the pairs in
# which it says something else.
PAIRS_OF_A_CELL = 4
# A rate at equal lengths speaks for at least this share of the pairs, or is not given. It is
# reached where the mean length difference is 1.4 standard deviations of length differences.
LEAST_SHARE = 0.25


def length_differences(candidate: Sequence[Reply], baseline: Sequence[Reply]) -> np.ndarray:
    """Characters of each candidate reply minus those of the baseline's, (n,).

    Characters, as in the paper, and not tokens: the two models of a match may have different
    tokenizers.
    """
    differences = []
    for ours, theirs in zip(candidate, baseline, strict=True):
        differences.append(len(ours.text) - len(theirs.text))
    return np.array(differences, dtype=np.float64)


def length_controlled_win_rate(
    outcome: np.ndarray,
    length_difference: np.ndarray,
    bootstrap: int,
    seed: int,
    clusters: ArrayLike | None = None,
) -> dict[str, float]:
    """Estimate the win rate at equal lengths, in [0, 1], with 95 % bounds over clusters.

    The estimand: among pairs as they were drawn (see the module), weighted so that for every size
    of the length difference the candidate is as often the longer one as the shorter one, the win
    rate that a logistic regression on the length difference gives for a difference of 0. Equal
    replies are ties and keep their share.

    Args:
        outcome: 1 for a win of the candidate, ½ for a tie, 0 for a loss, (prompts, replies).
        length_difference: Length of the candidate's minus that of the baseline's reply, (prompts,
            replies).
        bootstrap: Number of resamples; at most 500 are drawn.
        seed: Seed of the resamples.
        clusters: The cluster of each prompt, which are resampled; None: each is one of its own.

    Returns:
        ``lc_win_rate`` with bounds ``_low95`` and ``_high95``, and ``lc_share``: how large a share
        of the pairs has a counterpart, of equal size and opposite sign of the difference. Below a
        quarter nothing is decided: the rate is ½ and its bounds are 0 and 1.
    """
    replies = outcome.size // len(outcome)
    of_prompt = one_each(len(outcome), clusters)
    of_reply = np.repeat(of_prompt, replies)
    _, of_row = np.unique(of_reply, return_inverse=True)
    won = outcome.ravel()
    longer = length_difference.ravel()
    cell = length_cells(longer)
    equal_weights = np.ones((1, len(won)))
    balanced = balancing_weights(longer, cell, equal_weights)[0]
    share = float(balanced.mean())
    of_cluster = np.bincount(of_row, weights=balanced)
    total = float(of_cluster.sum())
    squares = float((of_cluster**2).sum())
    effective = total**2 / max(squares, 1e-300)
    undecided = {
        "lc_win_rate": 0.5,
        "lc_win_rate_low95": 0.0,
        "lc_win_rate_high95": 1.0,
        "lc_share": share,
    }
    if share < LEAST_SHARE:
        return undecided
    total = balanced.sum()
    mean_square = balanced @ longer**2 / total
    spread = float(np.sqrt(mean_square))
    feature = np.zeros_like(won)
    if spread > 0:
        feature = np.tanh(longer / spread)
    (fitted,) = rates_at_equal_length(won, feature, balanced[np.newaxis])
    rate = float(fitted)
    if effective < 2:
        return undecided | {"lc_win_rate": rate}
    rates = []
    resamples = min(bootstrap, MOST_RESAMPLES)
    for drawn in resample_weights(len(of_cluster), resamples, seed):
        weights = balancing_weights(longer, cell, drawn[:, of_row])
        rates.append(rates_at_equal_length(won, feature, weights))
    resampled = np.concatenate(rates)
    tail = (1 - CONFIDENCE) / 2
    # A resample without any counterparts shows nothing, and counts against either bound.
    lost_if_unknown = np.nan_to_num(resampled, nan=0.0)
    won_if_unknown = np.nan_to_num(resampled, nan=1.0)
    low = float(percentile(lost_if_unknown, tail, effective))
    high = float(percentile(won_if_unknown, 1 - tail, effective))
    mean = float(balanced @ won / total)
    score_low, score_high = win_rate_score_bounds(won, of_row, balanced)
    low = min(low, rate - (mean - score_low))
    high = max(high, rate + (score_high - mean))
    return {
        "lc_win_rate": rate,
        "lc_win_rate_low95": max(low, 0.0),
        "lc_win_rate_high95": min(high, 1.0),
        "lc_share": share,
    }


def length_cells(length_difference: np.ndarray) -> np.ndarray:
    """Number the cells of pairs whose length differences are of nearly the same size, (n,).

    The sign of the difference does not count.

    Cells are cut so that each has :data:`PAIRS_OF_A_CELL` of the rarer sign, which bounds how far
    two of them differ where they are many, and leaves counterparts to most where they are few.
    """
    longer = length_difference[length_difference > 0]
    shorter = -length_difference[length_difference < 0]
    rarer = longer
    if len(shorter) < len(longer):
        rarer = shorter
    cells = len(rarer) // PAIRS_OF_A_CELL
    if len(shorter) == len(longer):  # swapping the sides must not change the cells
        rarer = np.concatenate([longer, shorter])
    if cells < 2:
        return np.zeros(len(length_difference), dtype=np.int64)
    inner_shares = np.arange(1, cells) / cells
    edges = np.unique(np.quantile(rarer, inner_shares))
    return np.searchsorted(edges, np.abs(length_difference))


def balancing_weights(
    length_difference: np.ndarray, cell: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """Weight pairs so that in every cell the candidate is as often longer as it is shorter.

    These are overlap weights (Li, Morgan and Zaslavsky, 2018, "Balancing Covariates via Propensity
    Score Weighting"), doubled, so that those of a balanced cell are 1: the weight of a pair is
    twice the share of the other sign in its cell. Pairs of equal length keep theirs.

    Args:
        length_difference: Length of the candidate's minus that of the baseline's reply, (n,).
        cell: The cell of each pair (n,), see :func:`length_cells`.
        weights: How often each pair counts, (sets, n).

    Returns:
        The new weights (sets, n); 0 for pairs without a counterpart.
    """
    longer = length_difference > 0
    shorter = length_difference < 0
    _, place = np.unique(cell, return_inverse=True)
    order = np.argsort(place, kind="stable")
    cells_in_order = place[order]
    starts = np.flatnonzero(np.diff(cells_in_order, prepend=-1))
    weights_of_longer = (weights * longer)[:, order]
    weights_of_shorter = (weights * shorter)[:, order]
    of_longer = np.add.reduceat(weights_of_longer, starts, axis=1)
    of_shorter = np.add.reduceat(weights_of_shorter, starts, axis=1)
    both = np.maximum(of_longer + of_shorter, 1e-300)
    if_longer = (2 * of_shorter / both)[:, place]
    if_shorter = (2 * of_longer / both)[:, place]
    factor = np.where(longer, if_longer, if_shorter)
    factor = np.where(longer | shorter, factor, 1.0)
    return np.asarray(weights * factor)


def rates_at_equal_length(
    outcome: np.ndarray, feature: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """Fit ``P(win) = σ(θ + φ · feature)`` for each set of weights and return its ``σ(θ)``, (sets,).

    A tie is half a win and half a loss. φ has the penalty ½φ², which is weak beside some hundred
    prompts (the paper penalises it too): it keeps φ finite where length alone decides who wins. θ
    has none, so that a constant feature leaves the plain win rate. On weights that balance longer
    and shorter pairs the penalty does not move θ: it is 0 wherever the judge would be as biased
    with the sides swapped.

    Args:
        outcome: Shares of a win (n,).
        feature: ``tanh`` of the standardised length difference (n,); 0 where lengths are equal.
        weights: How much each row counts, (sets, n); a set of zeros gives NaN.
    """
    totals = weights.sum(axis=1)
    empty = totals <= 0
    divisors = np.where(empty, 1.0, totals)
    means = weights @ outcome / divisors
    plain = np.where(empty, np.nan, means)
    # Without a loss, or without a win, θ has no finite value.
    decided = empty | (plain <= 0) | (plain >= 1)
    if not feature.any() or decided.all():
        return plain
    theta = np.zeros(len(weights))
    phi = np.zeros(len(weights))
    for _ in range(NEWTON_STEPS):
        slopes = phi[:, np.newaxis] * feature
        share = expit(theta[:, np.newaxis] + slopes)
        residual = weights * (share - outcome)
        curvature = weights * share * (1 - share)
        slope_theta = residual.sum(axis=1)
        slope_phi = residual @ feature + phi
        # The Hessian: of θ twice, of both, of φ twice with its penalty.
        aa = curvature.sum(axis=1) + 1e-12
        ab = curvature @ feature
        bb = curvature @ feature**2 + 1
        determinant = aa * bb - ab**2
        step_theta = (bb * slope_theta - ab * slope_phi) / determinant
        step_phi = (aa * slope_phi - ab * slope_theta) / determinant
        # A full step from far away would overshoot; the loss is convex, so short ones arrive.
        length = np.hypot(step_theta, step_phi)
        length = np.maximum(length, 1e-300)
        shrink = np.minimum(1.0, LONGEST_STEP / length)
        theta -= shrink * step_theta
        phi -= shrink * step_phi
        undecided_steps = np.where(decided, 0.0, step_theta)
        if np.abs(undecided_steps).max() < TOLERANCE:
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

    Several replies to a question are not independent of each other: bounds resample clusters of
    prompts, each with all its replies.

    Args:
        candidate: Scores of one side, (prompts,) or (prompts, replies).
        baseline: Scores of the other side, of the same shape.
        tie_margin: Largest difference that is a tie, in the judge's unit; see
            :func:`tie_margin_of`.
        bootstrap: Number of resamples.
        seed: Seed of the resamples.
        length_difference: Length of the candidate's minus that of the baseline's reply, of the same
            shape, for the length-controlled win rate; None leaves it out.
        clusters: The cluster of each prompt (prompts,); None: each is one of its own.

    Returns:
        What :func:`compare_outcomes` does, ``mean_difference``, the paired mean of candidate -
        baseline in the judge's unit, with bounds unless all prompts ask the same, and
        ``tie_margin``.

    Raises:
        DataError: The scores are empty, unequal in number or not finite.
    """
    first = np.asarray(candidate, dtype=np.float64)
    second = np.asarray(baseline, dtype=np.float64)
    are_alike = first.shape == second.shape
    if not are_alike or first.ndim not in (1, 2):
        raise DataError(
            f"a comparison needs one score per prompt on both sides, got {first.shape} and {second.shape}"
        )
    if first.size == 0:
        raise DataError("a comparison needs at least one prompt; the test split is empty")
    require_finite(first)
    require_finite(second)
    # One row per prompt, one column per reply to it.
    difference = first - second
    difference = difference.reshape(len(first), -1)
    means = {"mean_difference": difference.mean(axis=1)}
    outcome = outcomes(difference, tie_margin)
    compared = compare_outcomes(outcome, bootstrap, seed, length_difference, clusters, means)
    return compared | {"tie_margin": tie_margin}


def compare_outcomes(
    outcome: ArrayLike,
    bootstrap: int = 2000,
    seed: int = 0,
    length_difference: ArrayLike | None = None,
    clusters: ArrayLike | None = None,
    means: Mapping[str, np.ndarray] | None = None,
) -> dict[str, float]:
    """Compare two sides by what a judge without scores said.

    Where each prompt has several pairs of replies, it is won if more of its pairs are won than
    lost.

    Args:
        outcome: 1 for a win of the candidate, ½ for a tie, 0 for a loss, (prompts,) or (prompts,
            replies).
        bootstrap: Number of resamples; the same clusters are drawn as in :func:`compare`.
        seed: Seed of the resamples.
        length_difference: See :func:`compare`.
        clusters: See :func:`compare`.
        means: Further values by prompt (prompts,), whose means get bounds over the same resamples.

    Returns:
        ``win``, ``tie`` and ``lose``, shares of prompts; ``win_rate``, the mean over prompts of the
        share of pairs won, ties as half a win; ``prompts``; ``clusters``, how many different
        questions these are, the unit of every bound and test
        (:mod:`~rlhf_core.evaluation.statistics`); ``clusters_won``, ``_tied`` and ``_lost`` as a
        whole; with lengths what :func:`length_controlled_win_rate` returns. Names that end in
        ``low95`` and ``high95`` are bounds over clusters: the wider of bootstrap and score bounds,
            since a bootstrap is empty where all outcomes agree.

    Raises:
        DataError: There are no outcomes.
    """
    won = np.asarray(outcome, dtype=np.float64)
    if won.size == 0:
        raise DataError("a comparison needs at least one prompt that was judged")
    won = won.reshape(len(won), -1)
    share_won = won.mean(axis=1)
    means = means or {}
    own_clusters = one_each(len(share_won), clusters)
    rows = np.stack([share_won, *means.values()])
    lows, highs = bootstrap_bounds(rows, bootstrap, seed, own_clusters)
    low = float(lows[0])
    high = float(highs[0])
    if np.isfinite(low):
        of_reply = np.repeat(own_clusters, won.shape[1])
        every_one = np.ones(won.size)
        score_low, score_high = win_rate_score_bounds(won.ravel(), of_reply, every_one)
        low = min(low, score_low)
        high = max(high, score_high)
    controlled = {}
    if length_difference is not None:
        longer_by = np.asarray(length_difference, dtype=np.float64)
        longer_by = longer_by.reshape(won.shape)
        controlled = length_controlled_win_rate(won, longer_by, bootstrap, seed, own_clusters)
    (sums,), sizes = cluster_sums(share_won[np.newaxis], own_clusters)
    above_half = np.round(sums / sizes - 0.5, 9)
    compared = {
        "win": float((share_won > 0.5).mean()),
        "tie": float((share_won == 0.5).mean()),
        "lose": float((share_won < 0.5).mean()),
        "win_rate": float(share_won.mean()),
        "win_rate_low95": max(low, 0.0),
        "win_rate_high95": min(high, 1.0),
        "prompts": len(share_won),
        "clusters": len(sizes),
        "clusters_won": int((above_half > 0).sum()),
        "clusters_tied": int((above_half == 0).sum()),
        "clusters_lost": int((above_half < 0).sum()),
        **controlled,
    }
    for row, (name, values) in enumerate(means.items(), start=1):
        below = float(lows[row])
        above = float(highs[row])
        compared[name] = float(values.mean())
        if np.isfinite(below) and np.isfinite(above):
            compared[f"{name}_low95"] = below
            compared[f"{name}_high95"] = above
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
        outcome: By judge 1 for a win, ½ for a tie, 0 for a loss, NaN where it did not decide
            (prompts, replies).
        bootstrap: Number of resamples.
        seed: Seed of the resamples.
        clusters: See :func:`compare`.

    Returns:
        Comparisons by group and judge; a judge that decided on no prompt of a group is left out.
    """
    of_prompt = one_each(len(groups), clusters)
    names = np.array(groups, dtype=object)
    table: dict[str, dict[str, dict[str, float]]] = {}
    for group in sorted(set(groups) - {""}):
        in_group = names == group
        table[group] = {}
        for judge, values in outcome.items():
            is_undecided = np.isnan(values).any(axis=1)
            known = in_group & ~is_undecided
            if known.any():
                clusters_here = of_prompt[known]
                table[group][judge] = compare_outcomes(
                    values[known], bootstrap, seed, clusters=clusters_here
                )
    return table


def tie_margin_of(judge: Judge, share: float, baseline: Sequence[float]) -> float:
    """Return the largest difference of ``judge``'s scores that is a tie.

    The judge's own margin where it has one, else ``share`` times the standard deviation of its
    ``baseline`` scores. The candidate has no part in it: a policy whose scores spread wider would
    turn its own losses into ties.
    """
    if judge.absolute_tie is not None:
        return judge.absolute_tie
    return share * float(np.std(baseline))


def outcomes(difference: np.ndarray, margin: float) -> np.ndarray:
    """Return 1 for a win, ½ for a tie (``|difference| <= margin``), 0 for a loss, elementwise."""
    is_tie = np.abs(difference) <= margin
    won = (difference > 0).astype(np.float64)
    return np.where(is_tie, 0.5, won)
