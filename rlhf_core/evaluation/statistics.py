"""Intervals and tests whose unit is the question, not the row.

Replies to one question, in whatever form or number, succeed and fail together. Everything here
therefore resamples and counts *clusters*: the content of a question in the synthetic world,
elsewhere the group that prompts are split by. With a design effect of 2 an interval over rows that
says 2.5 % is wrong at 8 %.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import scipy  # its parts are loaded when they are first used
from numpy.typing import ArrayLike

from rlhf_core.data.statistics import CONFIDENCE, cluster_sums, one_each, standard_error

BATCH = 256  # resamples drawn at once, to bound memory for many prompts
# With fewer clusters in which the two sides differ, how much replies to one question differ cannot
# be estimated.
FEW_DIFFERING = 10


def resample_weights(clusters: int, resamples: int, seed: int) -> Iterator[np.ndarray]:
    """How often each cluster is drawn in each resample, in batches of (resamples, clusters)."""
    rng = np.random.Generator(np.random.Philox(key=seed))
    for start in range(0, resamples, BATCH):
        size = min(BATCH, resamples - start)
        alike = np.full(clusters, 1 / clusters)
        counts = rng.multinomial(clusters, alike, size=size)
        yield counts.astype(np.float64)


def percentile(resampled: np.ndarray, tail: float, clusters: float) -> np.ndarray:
    """Return a lower (tail < ½) or upper quantile of resampled statistics (…, resamples).

    It is wider with fewer clusters.

    A plain percentile interval is too short by the factor ``sqrt((k - 1) / k)`` and by the
    difference between the normal and Student's distribution; the level is widened by both
    (Hesterberg, 2015, "What Teachers Should Know About the Bootstrap", section 5.3).
    """
    student = scipy.stats.t.ppf(tail, clusters - 1)
    widened = math.sqrt(clusters / (clusters - 1)) * student
    expanded = scipy.stats.norm.cdf(widened)
    return np.asarray(np.quantile(resampled, expanded, axis=-1))


def bootstrap_bounds(
    rows: np.ndarray, resamples: int, seed: int, clusters: ArrayLike | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return 95 % bootstrap bounds of each row's mean: (r, n) -> low (r,), high (r,).

    Clusters are resampled.

    All rows share the resampled clusters, so that they stay paired. One cluster alone shows
    nothing: its bounds are infinite.
    """
    of_row = one_each(rows.shape[-1], clusters)
    sums, sizes = cluster_sums(np.atleast_2d(rows), of_row)
    count = len(sizes)
    if count < 2:
        unbounded = np.full(len(sums), np.inf)
        return -unbounded, unbounded
    means = []
    for weights in resample_weights(count, resamples, seed):
        means.append(sums @ weights.T / (weights @ sizes))
    resampled = np.concatenate(means, axis=1)
    tail = (1 - CONFIDENCE) / 2
    low = percentile(resampled, tail, count)
    high = percentile(resampled, 1 - tail, count)
    return low, high


def effective_number(
    values: np.ndarray, clusters: np.ndarray, differs: np.ndarray, weights: np.ndarray
) -> float:
    """How many independent replies the weighted mean of ``values`` is worth.

    Replies are worth their number (Kish's, where weights differ) over the design effect. Where
    fewer than ten clusters have a reply that ``differs``, the effect is not known, and a cluster
    counts as one reply.

    Args:
        values: What the mean is of, (n,).
        clusters: The cluster of each, (n,).
        differs: 1 where a reply differs from what is common, (n,).
        weights: How much each counts, (n,).
    """
    share = weights / weights.sum()
    deviation = share * (values - share @ values)
    sums, _ = cluster_sums(np.stack([share, deviation, differs]), clusters)
    share_sums, deviation_sums, differing = sums
    count = len(differing)
    squared_share = share @ share
    independent = float(deviation @ deviation)
    largest = float((share_sums**2).sum() / squared_share)
    effect = largest
    if independent > 0 and np.count_nonzero(differing > 0) >= FEW_DIFFERING:
        robust = float((deviation_sums**2).sum()) * count / (count - 1)
        effect = min(max(robust / independent, 1.0), largest)
    return float(1 / squared_share) / effect


def win_rate_score_bounds(
    outcome: np.ndarray, clusters: np.ndarray, weights: np.ndarray
) -> tuple[float, float]:
    """Return 95 % score bounds of a weighted win rate.

    They are not empty where all replies have the same outcome.

    A bootstrap of ten wins of ten says 1 to 1. Tango's bounds at the effective number of replies
    say 0.72 to 1 (Wilson's, where nothing but wins is seen), and 0.36 to 0.64 of ten ties.

    Args:
        outcome: 1 for a win, ½ for a tie, 0 for a loss, (n,).
        clusters: The cluster of each, (n,).
        weights: How much each counts, (n,).
    """
    share = weights / weights.sum()
    shares = {}
    for value in (0.0, 0.5, 1.0):
        shares[value] = float(share[outcome == value].sum())
    commonest = max(shares, key=shares.__getitem__)
    differs = (outcome != commonest) & (weights > 0)
    number = effective_number(outcome, clusters, differs.astype(np.float64), weights)
    wins = number * shares[1.0]
    losses = number * shares[0.0]
    low, high = paired_difference_bounds(wins, losses, number)
    return (1 + low) / 2, (1 + high) / 2


def mean_high(values: np.ndarray, clusters: np.ndarray) -> float:
    """One-sided upper 95 % bound of a mean over clusters, by Student's distribution."""
    error, count = standard_error(values, clusters)
    if count < 2:
        return math.inf
    errors = scipy.stats.t.ppf(CONFIDENCE, count - 1)
    return float(values.mean() + errors * error)


def share_difference_high(lost: np.ndarray, gained: np.ndarray, clusters: np.ndarray) -> float:
    """Return the one-sided upper 95 % bound of the mean of ``lost - gained``, over clusters.

    Both are indicators, one per reply.

    The larger of two bounds: that of the cluster-robust variance, and Tango's score bound at the
    effective number of replies, which is not empty where no reply differs. Replies are worth their
    number over the design effect; where fewer than ten clusters differ, that is not known and a
    cluster counts as one reply: prompts, not replies, limit what can be said about rare events.
    """
    difference = lost - gained
    if len(np.unique(clusters)) < 2:
        return math.inf
    replies = len(difference)
    every_one = np.ones(replies)
    worth = effective_number(difference, clusters, lost + gained, every_one) / replies
    more = float(lost.sum()) * worth
    fewer = float(gained.sum()) * worth
    score = paired_difference_high(more, fewer, replies * worth)
    return max(score, mean_high(difference, clusters))


def paired_difference_high(
    more: float, fewer: float, count: float, confidence: float = CONFIDENCE
) -> float:
    """Return the one-sided upper score bound of a difference of paired proportions.

    Tango, 1998, "Equivalence test and confidence interval for the difference in proportions for the
    paired-sample design". If all differing pairs differ in one direction it is Wilson's bound; if
    none differ, ``z² / (n + z²)``.

    Args:
        more: Pairs in which only the first has the property; a fraction where a pair counts as less
            than one.
        fewer: Pairs in which only the second has it.
        count: All pairs.
        confidence: Of the one side.
    """
    z = float(scipy.stats.norm.ppf(confidence))

    def excess(difference: float) -> float:
        """The score statistic of ``difference`` plus z: 0 at the bound."""
        linear = -more - fewer + (2 * count - more + fewer) * difference
        constant = -fewer * difference * (1 - difference)
        # Rounding may leave a discriminant of nothing below 0.
        discriminant = max(linear**2 - 8 * count * constant, 0.0)
        only_second = (math.sqrt(discriminant) - linear) / (4 * count)
        variance = count * (2 * only_second + difference * (1 - difference))
        deviation = more - fewer - count * difference
        return deviation / math.sqrt(max(variance, 1e-300)) + z

    estimate = (more - fewer) / count
    nearly_one = 1 - 1e-9
    if estimate >= nearly_one:
        return 1.0
    above_estimate = min(estimate + 1e-9, nearly_one)
    return float(scipy.optimize.brentq(excess, above_estimate, nearly_one))


def paired_difference_bounds(more: float, fewer: float, count: float) -> tuple[float, float]:
    """Two-sided 95 % bounds of the same difference."""
    side = (1 + CONFIDENCE) / 2
    low = -paired_difference_high(fewer, more, count, side)
    return low, paired_difference_high(more, fewer, count, side)


def sign_test(wins: int, ties: int, losses: int, bar: float = 0.5) -> float:
    """Return the probability of at least so many wins if the true win rate were ``bar``.

    Ties count half.

    The sign test of Dixon and Mood (1946, "The Statistical Sign Test") on clusters, each of which
    is won, tied or lost as a whole: of two equal models either wins a cluster with the same
    probability, however its replies hang together. Ties are set aside, as in the classical test at
    ½. For another bar the null hypothesis is the share of the decided clusters at which the win
    rate, with these ties, is ``bar``.

    Args:
        wins: Clusters that the challenger wins.
        ties: Clusters that neither wins.
        losses: Clusters that the champion wins.
        bar: The win rate to be exceeded, in [0, 1].

    Returns:
        The one-sided p-value; 1 where nothing was decided, or where the bar cannot be exceeded.
    """
    decided = wins + losses
    if decided == 0:
        return 1.0
    share_at_bar = (bar * (decided + ties) - ties / 2) / decided
    if share_at_bar >= 1:
        return 1.0
    share_at_bar = max(share_at_bar, 0.0)
    test = scipy.stats.binomtest(wins, decided, share_at_bar, alternative="greater")
    return float(test.pvalue)


def level_of_attempt(budget: float, attempt: int) -> float:
    """Return the level of the test at an attempt, counted from 1; the first has half of ``budget``.

    Who tries often enough wins by luck at last: thirty independent attempts at 2.5 % each promote a
    model that is no better with a probability of 53 %. Alpha spending gives attempt ``k`` the level
    ``budget · γ(k)`` with ``Σ γ(k) = 1``. By Bonferroni's inequality all attempts together then
    promote wrongly with a probability of at most ``budget``, however many there are and however
    they depend on one another (Foster and Stine, 2008, "α-investing: a procedure for sequential
    control of expected false discoveries"; Tian and Ramdas, 2021, "Online control of the familywise
    error rate"). Here ``γ(k) = 1 / (k (k + 1))``, of which the first n add up to ``n / (n + 1)``.
    """
    if attempt < 1:
        raise ValueError(f"attempts are counted from 1, not {attempt}")
    return budget / (attempt * (attempt + 1))
