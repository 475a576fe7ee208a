"""Non-inferiority: how much worse than the champion the challenger may be, with 95 % confidence, on the same prompts.

A quantity holds if the upper bound of its loss is below the margin. That no loss was seen does not suffice: with few
prompts the bound is wide, and the quantity is not shown to hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize, stats

CONFIDENCE = 0.95  # one-sided


@dataclass(frozen=True)
class PairedLoss:
    """One quantity of two models on the same prompts, and how much worse the challenger is.

    Attributes:
        champion: Value of the champion.
        challenger: Value of the challenger.
        loss: How much worse the challenger is; negative if it is better. In the unit of the margin: a difference of
            shares, or for a length the relative growth.
        loss_high95: One-sided upper 95 % bound of ``loss``.
        prompts: How many prompts it was measured on.
    """

    champion: float
    challenger: float
    loss: float
    loss_high95: float
    prompts: int


def rate_loss(champion: Sequence[bool], challenger: Sequence[bool]) -> PairedLoss:
    """Compare the shares of replies that pass a check, (n,) each.

    The bound is that of Tango's score interval for paired proportions, which is not empty where no reply differs.
    """
    gained = sum(new and not old for old, new in zip(champion, challenger, strict=True))
    lost = sum(old and not new for old, new in zip(champion, challenger, strict=True))
    count = len(champion)
    return PairedLoss(
        champion=sum(champion) / count,
        challenger=sum(challenger) / count,
        loss=(lost - gained) / count,
        loss_high95=paired_difference_high(lost, gained, count),
        prompts=count,
    )


def paired_difference_high(more: int, fewer: int, count: int, confidence: float = CONFIDENCE) -> float:
    """Return the one-sided upper score bound of a difference of paired proportions.

    Tango, 1998, "Equivalence test and confidence interval for the difference in proportions for the paired-sample
    design". If all differing pairs differ in one direction it is Wilson's bound; if none differ, ``z² / (n + z²)``.

    Args:
        more: Pairs in which only the first has the property.
        fewer: Pairs in which only the second has it.
        count: All pairs.
        confidence: One-sided.
    """
    z = float(stats.norm.ppf(confidence))

    def excess(difference: float) -> float:
        """The score statistic of ``difference`` plus z: 0 at the bound."""
        linear = -more - fewer + (2 * count - more + fewer) * difference
        constant = -fewer * difference * (1 - difference)
        only_second = (math.sqrt(linear**2 - 8 * count * constant) - linear) / (4 * count)
        variance = count * (2 * only_second + difference * (1 - difference))
        return (more - fewer - count * difference) / math.sqrt(max(variance, 1e-300)) + z

    estimate = (more - fewer) / count
    if estimate >= 1:
        return 1.0
    nearly_one = 1 - 1e-9
    return float(optimize.brentq(excess, min(estimate + 1e-9, nearly_one), nearly_one))


def length_loss(champion: Sequence[float], challenger: Sequence[float], bootstrap: int, seed: int) -> PairedLoss:
    """Compare mean lengths of replies to the same prompts, (n,) each: the loss is the relative growth."""
    old, new = np.asarray(champion, dtype=np.float64), np.asarray(challenger, dtype=np.float64)

    def growth(first: np.ndarray, second: np.ndarray, axis: int = -1) -> np.ndarray:
        return np.asarray(second.mean(axis) / np.maximum(first.mean(axis), 1e-9) - 1)

    loss = float(growth(old, new))
    high = _bootstrap_high((old, new), growth, bootstrap, seed) if len(old) > 1 else math.inf
    return PairedLoss(float(old.mean()), float(new.mean()), loss, high, len(old))


def category_losses(categories: Sequence[str], outcome: np.ndarray, bootstrap: int, seed: int) -> dict[str, PairedLoss]:
    """Compare win rates by category: the loss is what the challenger's win rate lacks of one half.

    Args:
        categories: The category of each prompt (n,).
        outcome: 1 for a win of the challenger, ½ for a tie, 0 for a loss, (n,).
        bootstrap: Number of resamples.
        seed: Seed of the resamples.
    """
    losses = {}
    for category in sorted(set(categories)):
        wins = outcome[[name == category for name in categories]]
        rate = float(wins.mean())
        high = math.inf
        if len(wins) > 1:
            high = _bootstrap_high((wins,), lambda row, axis=-1: 0.5 - row.mean(axis), bootstrap, seed)
        losses[category] = PairedLoss(1 - rate, rate, 0.5 - rate, high, len(wins))
    return losses


def _bootstrap_high(rows: tuple[np.ndarray, ...], statistic: object, resamples: int, seed: int) -> float:
    """One-sided upper 95 % percentile-bootstrap bound over prompts."""
    interval = stats.bootstrap(
        rows,
        statistic,
        paired=True,
        vectorized=True,
        axis=-1,
        method="percentile",
        alternative="less",
        confidence_level=CONFIDENCE,
        n_resamples=resamples,
        batch=256,
        rng=np.random.Generator(np.random.Philox(key=seed)),
    ).confidence_interval
    return float(interval.high)


def as_measurements(losses: Mapping[str, PairedLoss]) -> dict[str, dict[str, float | None]]:
    """The losses by name as JSON; a bound that does not exist is None."""
    return {
        name: {
            "champion": loss.champion,
            "challenger": loss.challenger,
            "loss": loss.loss,
            "loss_high95": loss.loss_high95 if math.isfinite(loss.loss_high95) else None,
            "prompts": loss.prompts,
        }
        for name, loss in losses.items()
    }
