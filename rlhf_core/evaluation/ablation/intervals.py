"""Means over seeds with 95 % intervals, and paired differences between variants.

The seed is the unit of replication: each brings its own world, SFT model, reward model, referee and random numbers, and
every variant of a seed is judged on the same held-out prompts. Prompts within a seed are not independent trials of a
training method, so they never narrow an interval here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy import stats

from rlhf_core.config.ablation import METRICS, Metric
from rlhf_core.evaluation.ablation.results import RunResult


@dataclass(frozen=True)
class Interval:
    """Mean of ``n`` values and its 95 % bounds by Student's t with n - 1 degrees of freedom.

    The bounds are infinite for one value; all numbers are NaN for none.
    """

    mean: float
    low: float
    high: float
    n: int

    def excludes(self, value: float) -> bool:
        """Return whether ``value`` lies outside the bounds."""
        return self.low > value or self.high < value

    def shifted(self, by: float) -> Interval:
        """Return the interval moved by a constant."""
        return Interval(self.mean + by, self.low + by, self.high + by, self.n)

    def in_readers_unit(self, metric: Metric) -> Interval:
        """Return the interval back from the scale of comparison: a difference of logarithms becomes a factor."""
        if metric.kind != "ratio":
            return self
        mean, low, high = (math.exp(v) if v < 700 else math.inf for v in (self.mean, self.low, self.high))
        return Interval(mean, low, high, self.n)


def t_interval(values: Sequence[float]) -> Interval:
    """Compute Student's interval: ``mean ± t(.975, n - 1) · s / sqrt(n)``, s the sample standard deviation (n - 1)."""
    n = len(values)
    if n == 0:
        return Interval(math.nan, math.nan, math.nan, 0)
    mean = math.fsum(values) / n
    if n == 1:
        return Interval(mean, -math.inf, math.inf, 1)
    error = float(stats.sem(values))
    # Scipy's interval is NaN for a scale of zero.
    low, high = stats.t.interval(0.95, n - 1, loc=mean, scale=error) if error > 0 else (mean, mean)
    return Interval(mean, float(low), float(high), n)


def to_comparison_scale(metric: Metric, value: float) -> float:
    """Return the value on the scale on which it is compared: its logarithm for a ratio metric."""
    return math.log(max(value, metric.floor)) if metric.kind == "ratio" else value


class SeedTable:
    """End values by variant, seed and metric."""

    def __init__(self, results: Sequence[RunResult]) -> None:
        self._values: dict[str, dict[int, Mapping[str, float]]] = {}
        for result in results:
            if result.values:
                self._values.setdefault(result.run.variant, {})[result.run.seed] = result.values

    def by_seed(self, variant: str, metric: str) -> dict[int, float]:
        """Return values on the scale of comparison, by seed; seeds without the metric are absent."""
        rows = self._values.get(variant, {})
        return {
            seed: to_comparison_scale(METRICS[metric], row[metric])
            for seed, row in sorted(rows.items())
            if metric in row
        }

    def level(self, variant: str, metric: str) -> Interval:
        """Return the mean over seeds on the scale of comparison."""
        return t_interval(list(self.by_seed(variant, metric).values()))

    def difference(self, variant: str, other: str, metric: str) -> Interval:
        """Return the mean of ``variant - other`` over the seeds that both have, on the scale of comparison."""
        first, second = self.by_seed(variant, metric), self.by_seed(other, metric)
        return t_interval([first[seed] - second[seed] for seed in first if seed in second])
