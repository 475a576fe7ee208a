"""What a reward model is worth beyond accuracy.

There are margins, calibration, length and categories, and a bag of words to compare with.

Source: algorithms.md §2. Pure functions of arrays over B pairs; ``margins`` is ``r_w - r_l``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import optimize

from rlhf_core.data.batches import length_balanced_rows
from rlhf_core.data.schema import Preference
from rlhf_core.data.statistics import (
    design_effect,
    linear_correlation,
    one_each,
    rank_correlation,
    wilson_bounds,
)
from rlhf_core.data.text import IDEOGRAPHS
from rlhf_core.errors import DataError
from rlhf_core.storage.files import read_json

CALIBRATION_BINS = 10
PERCENTILES = (5, 25, 50, 75, 95)
SMALLEST_CATEGORY = 10
FEWEST_BALANCED_PAIRS = 50


def accuracy(margins: np.ndarray) -> float:
    """Share of pairs ranked as people did; an exact tie counts half."""
    return float(rightness(margins).mean())


def rightness(margins: np.ndarray) -> np.ndarray:
    """1 where a pair is ranked as people did, ½ for a tie, 0 otherwise (B,)."""
    is_right = margins > 0
    is_tie = margins == 0
    return np.asarray(is_right + 0.5 * is_tie)


def calibration_bins(margins: np.ndarray) -> list[tuple[float, float, int]]:
    """``(mean confidence, share correct, pairs)`` of each non-empty one of ten bins.

    The model says that the reply it scores higher is preferred with probability
    ``sigma(|margin|)``, which lies in [0.5, 1]; the bins divide that range evenly.
    """
    size = np.abs(margins)
    confidence = 1.0 / (1.0 + np.exp(-size))
    correct = rightness(margins)
    bins = (confidence - 0.5) * 2 * CALIBRATION_BINS
    which = np.minimum(bins.astype(int), CALIBRATION_BINS - 1)
    filled = []
    for number in range(CALIBRATION_BINS):
        is_here = which == number
        if is_here.any():
            mean_confidence = float(confidence[is_here].mean())
            share_correct = float(correct[is_here].mean())
            filled.append((mean_confidence, share_correct, int(is_here.sum())))
    return filled


def expected_calibration_error(margins: np.ndarray) -> float:
    """Mean over pairs of |confidence - share correct| of their bin.

    0 when margins mean what they say.
    """
    error = 0.0
    for confidence, share_correct, pairs in calibration_bins(margins):
        error += abs(confidence - share_correct) * pairs
    return error / len(margins)


def evaluate_scores(
    chosen: np.ndarray,
    rejected: np.ndarray,
    chosen_lengths: np.ndarray,
    rejected_lengths: np.ndarray,
    seed: int = 0,
    temperature: float | None = None,
    clusters: np.ndarray | None = None,
) -> dict[str, float]:
    """All figures of one split.

    Rewards and reply lengths in tokens, and the cluster of each pair's prompt, each (B,).

    ``accuracy_shorter_preferred`` is left out where no preferred reply is the shorter one. ``seed``
    draws the length-balanced pairs. With ``temperature``, fitted on other pairs, calibration is
    measured after scaling too.
    """
    margins = chosen - rejected
    rewards = np.concatenate([chosen, rejected])
    lengths = np.concatenate([chosen_lengths, rejected_lengths])
    longer_by = chosen_lengths - rejected_lengths
    figures = {
        "pairs": float(len(margins)),
        "accuracy": accuracy(margins),
        "loss": float(np.logaddexp(0.0, -margins).mean()),
        "margin_mean": float(margins.mean()),
        "margin_std": float(margins.std()),
        "ece": expected_calibration_error(margins),
        "length_correlation": rank_correlation(rewards, lengths),
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "baseline_longer": accuracy(longer_by.astype(float)),
    }
    for percent in PERCENTILES:
        figures[f"margin_p{percent:02d}"] = float(np.percentile(margins, percent))
    is_shorter = longer_by < 0
    if is_shorter.any():
        figures["accuracy_shorter_preferred"] = accuracy(margins[is_shorter])
    balanced = length_balanced_rows(longer_by, seed)
    own_clusters = one_each(len(margins), clusters)
    figures |= length_balanced_accuracy(margins[balanced], own_clusters[balanced])
    if temperature is not None:
        compared = {"ece": margins, "ece_length_balanced": margins[balanced]}
        for name, of_pairs in compared.items():
            if name in figures:
                scaled = expected_calibration_error(of_pairs / temperature)
                figures[f"{name}_temperature_scaled"] = scaled
    return figures


def length_balanced_accuracy(margins: np.ndarray, clusters: np.ndarray) -> dict[str, float]:
    """Accuracy and calibration error on length-balanced pairs, and how many there are.

    Fewer than fifty pairs say nothing; both are left out then, so that a gate on them fails.
    ``low95`` is the lower bound of Wilson's 95 % interval for as many pairs as these are worth,
    which share ``clusters``; a tie of rewards, half a success for the accuracy, is a failure for
    its bound.
    """
    figures = {"length_balanced_pairs": float(len(margins))}
    if len(margins) < FEWEST_BALANCED_PAIRS:
        return figures
    right = (margins > 0).astype(float)
    worth = len(right) / design_effect(right, clusters)
    low, _ = wilson_bounds(float(right.mean()), worth)
    return figures | {
        "accuracy_length_balanced": accuracy(margins),
        "accuracy_length_balanced_low95": low,
        "ece_length_balanced": expected_calibration_error(margins),
    }


def accuracy_by_category(margins: np.ndarray, categories: Sequence[str]) -> dict[str, float]:
    """Accuracy of each category with at least ten pairs (fewer say nothing).

    Pairs of "" are in none.
    """
    names = np.asarray(categories)
    of_category = {}
    for name in sorted(set(categories) - {""}):
        margins_here = margins[names == name]
        if len(margins_here) >= SMALLEST_CATEGORY:
            of_category[name] = accuracy(margins_here)
    return of_category


def agreement(first: np.ndarray, second: np.ndarray) -> float:
    """Share of pairs that two models rank the same way, from the margins of each."""
    agrees = np.sign(first) == np.sign(second)
    return float(agrees.mean())


def agreement_metrics(first: Path, second: Path) -> dict[str, float]:
    """Compare the rewards of two models on the pairs that both have scored.

    Returns:
        ``share`` is the share of pairs that both rank alike; the others are correlations of rewards
        and of margins.

    Raises:
        DataError: They have no pair in common.
    """
    of_first = _read_scores(first)
    of_second = _read_scores(second)
    common = sorted(of_first.keys() & of_second.keys())
    if not common:
        raise DataError(f"{first} and {second} have no pair in common; run their stages again")
    a = np.array([of_first[row] for row in common])
    b = np.array([of_second[row] for row in common])
    margins = a[:, 0] - a[:, 1], b[:, 0] - b[:, 1]
    return {
        "pairs": float(len(common)),
        "share": agreement(*margins),
        "score_correlation": linear_correlation(a.ravel(), b.ravel()),
        "score_rank_correlation": rank_correlation(a.ravel(), b.ravel()),
        "margin_correlation": linear_correlation(*margins),
    }


def _read_scores(path: Path) -> dict[str, tuple[float, float]]:
    table = read_json(path)
    rewards = zip(table["chosen"], table["rejected"], strict=True)
    return dict(zip(table["ids"], rewards, strict=True))


WORDS = 5000
MOST_PAIRS = 20000
# An ideograph is a word of its own: without spaces, a whole clause would be one.
TOKEN_PATTERN = rf"[{IDEOGRAPHS}]|[^\W{IDEOGRAPHS}]+|[^\w\s]"


def bag_of_words_accuracy(
    train: Sequence[Preference], held_out: Mapping[str, Sequence[Preference]]
) -> dict[str, float]:
    """Accuracy on held-out splits of a logistic regression on differences of word counts.

    It is trained on at most 20,000 pairs and reads replies alone: it can learn style, but not
    answers to prompts.
    """
    from scipy.sparse import vstack
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression

    pairs = train[:MOST_PAIRS]
    vectorizer = CountVectorizer(max_features=WORDS, token_pattern=TOKEN_PATTERN)
    texts: list[str] = []
    for pair in pairs:
        texts += [pair.chosen, pair.rejected]
    try:
        vectorizer.fit(texts)
    except ValueError:
        # Replies without any word give the regression no feature.
        return dict.fromkeys(held_out, 0.5)

    def differences(rows: Sequence[Preference]) -> Any:
        """Sparse (pairs, words)."""
        chosen = vectorizer.transform([pair.chosen for pair in rows])
        rejected = vectorizer.transform([pair.rejected for pair in rows])
        return chosen - rejected

    features = differences(pairs)
    # Each pair enters both ways round, so that the labels are balanced and no intercept is needed.
    both_orders = vstack([features, -features])
    labels = np.repeat([1.0, 0.0], len(pairs))
    model = LogisticRegression(fit_intercept=False, max_iter=1000).fit(both_orders, labels)
    of_split = {}
    for name, rows in held_out.items():
        margins = model.decision_function(differences(rows))
        of_split[name] = accuracy(margins)
    return of_split


LIMITS = (0.01, 100.0)


def fitted_temperature(margins: np.ndarray) -> float:
    """Return the temperature within ``LIMITS`` that minimises the ranking loss.

    For the temperature T that is ``mean(log(1 + exp(-margin / T)))``.

    Divided by it, the confidence of margins matches how often they are right (Guo et al., 2017, "On
    Calibration of Modern Neural Networks"). No ranking changes, and PPO normalises rewards: it
    matters to readers only.

    T lies at the upper limit where the margins are wrong as often as right, and at the lower one
    where they are never wrong. It must be fitted on pairs other than those it is measured on.
    """

    def loss(log_temperature: float) -> float:
        scaled = -margins / math.exp(log_temperature)
        return float(np.logaddexp(0.0, scaled).mean())

    lowest, highest = map(math.log, LIMITS)
    best = optimize.minimize_scalar(loss, bounds=(lowest, highest), method="bounded")
    return math.exp(float(best.x))
