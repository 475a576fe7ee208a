"""Win, tie, lose between two sets of replies to the same prompts, with bootstrap intervals over prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from rlhf_core.errors import DataError

_CHUNK = 256  # resamples drawn at once, to bound memory for many prompts


@dataclass(frozen=True)
class Comparison:
    """Shares of prompts that the candidate wins, ties and loses; ``win_rate = (win + tie / 2)``, all in [0, 1].

    ``mean_difference`` is the paired mean of candidate - baseline in the judge's units. The ``low95`` and ``high95``
    fields are percentile-bootstrap bounds over prompts. ``tie_margin`` is the difference that was still a tie.
    """

    win: float
    tie: float
    lose: float
    win_rate: float
    win_rate_low95: float
    win_rate_high95: float
    mean_difference: float
    mean_difference_low95: float
    mean_difference_high95: float
    tie_margin: float
    prompts: int

    def as_dict(self) -> dict[str, float]:
        """Plain numbers for ``metrics/evaluation.json``."""
        return asdict(self)


def compare(
    candidate: Sequence[float],
    baseline: Sequence[float],
    tie_margin: float = 0.05,
    bootstrap: int = 2000,
    seed: int = 0,
    absolute: bool = False,
) -> Comparison:
    """Compare paired scores ``candidate[i]`` and ``baseline[i]`` of the same prompt.

    A pair is a tie when the difference is at most ``tie_margin`` times the standard deviation of all scores of both
    sides (learned judges have no unit), or at most ``tie_margin`` itself when ``absolute`` (gold has one).
    Raises :class:`DataError` for empty, unequal or non-finite input.
    """
    first, second = _paired(candidate, baseline)
    margin = tie_margin if absolute else tie_margin * float(np.concatenate([first, second]).std())
    difference = first - second
    outcome = outcomes(difference, margin)
    (rate_low, rate_high), (mean_low, mean_high) = _intervals([outcome, difference], bootstrap, seed)
    return Comparison(
        win=float((outcome == 1.0).mean()),
        tie=float((outcome == 0.5).mean()),
        lose=float((outcome == 0.0).mean()),
        win_rate=float(outcome.mean()),
        win_rate_low95=rate_low,
        win_rate_high95=rate_high,
        mean_difference=float(difference.mean()),
        mean_difference_low95=mean_low,
        mean_difference_high95=mean_high,
        tie_margin=margin,
        prompts=len(difference),
    )


def outcomes(difference: np.ndarray, margin: float) -> np.ndarray:
    """1 for a win, ½ for a tie (``|difference| <= margin``), 0 for a loss; shape (n,)."""
    return np.where(np.abs(difference) <= margin, 0.5, (difference > 0).astype(np.float64))


def bootstrap_interval(values: Sequence[float], bootstrap: int = 2000, seed: int = 0) -> tuple[float, float]:
    """95 % percentile-bootstrap bounds of the mean of ``values`` (n,)."""
    return _intervals([np.asarray(values, dtype=np.float64)], bootstrap, seed)[0]


def _paired(candidate: Sequence[float], baseline: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    first, second = np.asarray(candidate, dtype=np.float64), np.asarray(baseline, dtype=np.float64)
    if first.shape != second.shape or first.ndim != 1:
        raise DataError(f"a comparison needs one score per prompt on both sides, got {first.shape} and {second.shape}")
    if first.size == 0:
        raise DataError("a comparison needs at least one prompt; the test split is empty")
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        raise DataError("a judge gave a score that is not finite; its model folder is probably damaged")
    return first, second


def _intervals(columns: list[np.ndarray], bootstrap: int, seed: int) -> list[tuple[float, float]]:
    """Bounds of each column's mean; all columns share the resampled prompts, so that they stay paired."""
    stream = np.random.default_rng(np.random.Philox(key=seed))
    data = np.stack(columns)
    n = data.shape[1]
    means = np.empty((len(columns), bootstrap))
    for start in range(0, bootstrap, _CHUNK):
        stop = min(start + _CHUNK, bootstrap)
        picks = stream.integers(0, n, size=(stop - start, n))
        means[:, start:stop] = data[:, picks].mean(axis=2)
    low, high = np.percentile(means, [2.5, 97.5], axis=1)
    return [(float(a), float(b)) for a, b in zip(low, high, strict=True)]
