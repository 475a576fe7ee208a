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

from rlhf_core.config.ablation.metrics import METRICS, Metric
from rlhf_core.evaluation.ablation.results import Result


@dataclass(frozen=True)
class Interval:
    """Mean of ``n`` values and its 95 % bounds by Student's t with n - 1 degrees of freedom.

    Infinite bounds for one value, NaN for none."""

    mean: float
    low: float
    high: float
    n: int

    def excludes(self, value: float) -> bool:
        """Whether ``value`` lies outside the bounds."""
        return self.low > value or self.high < value

    def shifted(self, by: float) -> Interval:
        """The same interval moved by a constant."""
        return Interval(self.mean + by, self.low + by, self.high + by, self.n)

    def map(self, metric: Metric) -> Interval:
        """Back from the scale of comparison: a difference of logs becomes a factor."""
        if metric.kind != "ratio":
            return self
        return Interval(_exp(self.mean), _exp(self.low), _exp(self.high), self.n)


def t_interval(values: Sequence[float]) -> Interval:
    """Student's interval: ``mean ± t(.975, n - 1) · s / sqrt(n)`` with s the sample standard deviation (n - 1)."""
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


def scaled(metric: Metric, value: float) -> float:
    """The value on the scale on which it is compared: its logarithm for a ratio metric."""
    return math.log(max(value, metric.floor)) if metric.kind == "ratio" else value


class Table:
    """End values by variant, seed and metric."""

    def __init__(self, results: Sequence[Result]) -> None:
        self._values: dict[str, dict[int, Mapping[str, float]]] = {}
        for result in results:
            if result.values:
                self._values.setdefault(result.run.variant, {})[result.run.seed] = result.values

    def by_seed(self, variant: str, metric: str) -> dict[int, float]:
        """Values on the scale of comparison, by seed; seeds without the metric are absent."""
        rows = self._values.get(variant, {})
        return {seed: scaled(METRICS[metric], row[metric]) for seed, row in sorted(rows.items()) if metric in row}

    def level(self, variant: str, metric: str) -> Interval:
        """Mean over seeds on the scale of comparison."""
        return t_interval(list(self.by_seed(variant, metric).values()))

    def difference(self, variant: str, other: str, metric: str) -> Interval:
        """Mean of ``variant - other`` over the seeds that both have, on the scale of comparison."""
        first, second = self.by_seed(variant, metric), self.by_seed(other, metric)
        return t_interval([first[seed] - second[seed] for seed in first if seed in second])


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
