"""Decide whether a claim holds, by a stated rule and from intervals alone.

With D the paired difference (for ratio metrics of logarithms) and its 95 % interval [low, high] over seeds:

* ``higher by m`` holds if low > m, does not hold if high <= m, otherwise it cannot be told;
* ``lower by m`` is the same rule on -D;
* ``same within w`` holds if -w <= low and high <= w, does not hold if low > w or high < -w, otherwise it cannot be
  told.

A claim holds if all its expectations do, does not hold if one of them does not, otherwise it cannot be told.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from rlhf_core.config.ablation import METRICS, Claim, Expectation, Metric
from rlhf_core.evaluation.ablation.intervals import Interval, SeedTable, to_comparison_scale


class ClaimOutcome(StrEnum):
    """What the data say about a claim or an expectation."""

    HOLDS = "holds"
    FAILS = "does not hold"
    OPEN = "cannot tell"


@dataclass(frozen=True)
class Evidence:
    """One expectation and what was measured.

    Attributes:
        outcome: What the data say about the expectation.
        expected: The expectation as a formula.
        interval: The measured interval in the reader's unit (factors for ratio metrics).
    """

    outcome: ClaimOutcome
    expected: str
    interval: Interval

    @property
    def measured(self) -> str:
        """The interval as text."""
        if self.interval.n < 2:
            return "one seed: no interval" if self.interval.n else "not run"
        low, high = self.interval.low, self.interval.high
        return f"{self.interval.mean:.3g}, 95 % {low:.3g} to {high:.3g}, {self.interval.n} seeds"


@dataclass(frozen=True)
class ClaimVerdict:
    """A claim (``says``), its outcome, and the evidence for each of its expectations."""

    says: str
    outcome: ClaimOutcome
    evidence: tuple[Evidence, ...]


def judge_claim(claim: Claim, table: SeedTable) -> ClaimVerdict:
    """Apply the rule to every expectation of the claim."""
    evidence = tuple(examine(expectation, table) for expectation in claim.expects)
    return ClaimVerdict(claim.says, combine([item.outcome for item in evidence]), evidence)


def combine(outcomes: Sequence[ClaimOutcome]) -> ClaimOutcome:
    """Combine outcomes: all must hold, and one that does not hold decides."""
    if ClaimOutcome.FAILS in outcomes:
        return ClaimOutcome.FAILS
    return ClaimOutcome.HOLDS if all(outcome is ClaimOutcome.HOLDS for outcome in outcomes) else ClaimOutcome.OPEN


def examine(expectation: Expectation, table: SeedTable) -> Evidence:
    """Compare one expectation with the data."""
    metric = METRICS[expectation.metric]
    if isinstance(expectation.than, str):
        difference = reported = table.difference(expectation.of, expectation.than, expectation.metric)
    else:
        reported = table.level(expectation.of, expectation.metric)
        difference = reported.shifted(-to_comparison_scale(metric, expectation.than))
    outcome = ClaimOutcome.OPEN if difference.n < 2 else decide(expectation, difference, metric)
    return Evidence(outcome, formula(expectation, metric), reported.in_readers_unit(metric))


def decide(expectation: Expectation, difference: Interval, metric: Metric) -> ClaimOutcome:
    """Apply the rule to ``difference``, which is on the scale of comparison."""
    low, high = difference.low, difference.high
    if expectation.relation == "same":
        width = abs(_margin(expectation.within, metric))
        if -width <= low and high <= width:
            return ClaimOutcome.HOLDS
        return ClaimOutcome.FAILS if low > width or high < -width else ClaimOutcome.OPEN
    if expectation.relation == "lower":
        low, high = -high, -low
    margin = _margin(expectation.by, metric)
    if low > margin:
        return ClaimOutcome.HOLDS
    return ClaimOutcome.FAILS if high <= margin else ClaimOutcome.OPEN


def formula(expectation: Expectation, metric: Metric) -> str:
    """Write an expectation as ``gold score: vanilla − ppo-max < 0``, ``KL: vanilla / ppo-max > 1`` or ``KL: a < 6``."""
    if isinstance(expectation.than, str):
        subject, centre = f"{expectation.of} {'/' if metric.kind == 'ratio' else '−'} {expectation.than}", 0.0
    else:
        subject, centre = expectation.of, to_comparison_scale(metric, expectation.than)
    if expectation.relation == "same":
        width = abs(_margin(expectation.within, metric))
        low, high = (_in_readers_unit(centre + by, metric) for by in (-width, width))
        return f"{metric.label}: {subject} within {low:.3g} to {high:.3g}"
    margin = _margin(expectation.by, metric)
    if expectation.relation == "higher":
        return f"{metric.label}: {subject} > {_in_readers_unit(centre + margin, metric):.3g}"
    return f"{metric.label}: {subject} < {_in_readers_unit(centre - margin, metric):.3g}"


def _margin(given: float | None, metric: Metric) -> float:
    """A margin of ablation.yaml on the scale of comparison."""
    if given is None:
        return 0.0
    return math.log(given) if metric.kind == "ratio" else given


def _in_readers_unit(bound: float, metric: Metric) -> float:
    return math.exp(bound) if metric.kind == "ratio" else bound
