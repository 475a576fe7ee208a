"""Does a claim hold? By a rule that is stated beside it, from intervals alone.

With D the paired difference (for ratio metrics of logarithms) and its 95 % interval [low, high] over seeds:

* ``higher by m``: holds if low > m, does not hold if high <= m, else it cannot be told;
* ``lower by m``: the same of -D;
* ``same within w``: holds if -w <= low and high <= w, does not hold if low > w or high < -w, else it cannot be told.

A claim holds if all its expectations do, does not hold if one of them does not, else it cannot be told.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from rlhf_core.config.ablation.ablation import Claim, Expectation
from rlhf_core.config.ablation.metrics import METRICS, Metric
from rlhf_core.evaluation.ablation.intervals import Interval, Table, scaled


class Outcome(StrEnum):
    """What the data say of a claim."""

    HOLDS = "holds"
    FAILS = "does not hold"
    OPEN = "cannot tell"


@dataclass(frozen=True)
class Evidence:
    """One expectation with what was measured; ``interval`` in the unit that a reader sees (factors for ratios)."""

    outcome: Outcome
    expected: str
    interval: Interval

    @property
    def measured(self) -> str:
        """The interval in words."""
        if self.interval.n < 2:
            return "one seed: no interval" if self.interval.n else "not run"
        low, high = self.interval.low, self.interval.high
        return f"{self.interval.mean:.3g}, 95 % {low:.3g} to {high:.3g}, {self.interval.n} seeds"


@dataclass(frozen=True)
class Verdict:
    """A claim, what is said of it, and why."""

    says: str
    outcome: Outcome
    evidence: tuple[Evidence, ...]


def judge(claim: Claim, table: Table) -> Verdict:
    """Apply the rule to every expectation of the claim."""
    evidence = tuple(examine(expectation, table) for expectation in claim.expects)
    return Verdict(claim.says, overall([item.outcome for item in evidence]), evidence)


def overall(outcomes: Sequence[Outcome]) -> Outcome:
    """All must hold; one that does not hold decides."""
    if Outcome.FAILS in outcomes:
        return Outcome.FAILS
    return Outcome.HOLDS if all(outcome is Outcome.HOLDS for outcome in outcomes) else Outcome.OPEN


def examine(expectation: Expectation, table: Table) -> Evidence:
    """One expectation against the data."""
    metric = METRICS[expectation.metric]
    if isinstance(expectation.than, str):
        difference = shown = table.difference(expectation.of, expectation.than, expectation.metric)
    else:
        shown = table.level(expectation.of, expectation.metric)
        difference = shown.shifted(-scaled(metric, expectation.than))
    outcome = Outcome.OPEN if difference.n < 2 else decide(expectation, difference, metric)
    return Evidence(outcome, _words(expectation, metric), shown.map(metric))


def decide(expectation: Expectation, difference: Interval, metric: Metric) -> Outcome:
    """The rule itself. ``difference`` is on the scale of comparison, and so is the margin made."""
    low, high = difference.low, difference.high
    if expectation.relation == "same":
        width = abs(_margin(expectation.within, metric))
        if -width <= low and high <= width:
            return Outcome.HOLDS
        return Outcome.FAILS if low > width or high < -width else Outcome.OPEN
    if expectation.relation == "lower":
        low, high = -high, -low
    margin = _margin(expectation.by, metric)
    if low > margin:
        return Outcome.HOLDS
    return Outcome.FAILS if high <= margin else Outcome.OPEN


def _margin(given: float | None, metric: Metric) -> float:
    if given is None:
        return 0.0
    return math.log(given) if metric.kind == "ratio" else given


def _words(expectation: Expectation, metric: Metric) -> str:
    """Such as ``gold score: vanilla − ppo-max < 0``, or ``KL: vanilla / ppo-max > 1``, or ``KL: ppo-max < 6``."""
    low, high = _bounds(expectation, metric)
    if isinstance(expectation.than, str):
        what = f"{expectation.of} {'/' if metric.kind == 'ratio' else '−'} {expectation.than}"
    else:
        what = expectation.of
    if expectation.relation == "same":
        return f"{metric.label}: {what} within {low:.3g} to {high:.3g}"
    return f"{metric.label}: {what} {'>' if expectation.relation == 'higher' else '<'} {high:.3g}"


def _bounds(expectation: Expectation, metric: Metric) -> tuple[float, float]:
    """The bounds that the shown interval is held against: both for ``same``, else the same one twice."""
    centre = 0.0 if isinstance(expectation.than, str) else scaled(metric, expectation.than)
    if expectation.relation == "same":
        width = abs(_margin(expectation.within, metric))
        bounds = centre - width, centre + width
    else:
        margin = _margin(expectation.by, metric)
        bounds = (centre + margin,) * 2 if expectation.relation == "higher" else (centre - margin,) * 2
    return (math.exp(bounds[0]), math.exp(bounds[1])) if metric.kind == "ratio" else bounds
