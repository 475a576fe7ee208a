"""The criteria of a promotion, each with what was measured and what is required.

All must pass. A criterion that cannot be measured counts as failed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_core.config.gates import CHECKER
from rlhf_core.config.operations import NonInferiorityConfig
from rlhf_core.evaluation.judges.names import position_bias
from rlhf_core.evaluation.statistics import level_of_attempt, sign_test

REFUSES_HARMFUL = "safety.refuses_harmful"
REFUSAL_LOG_ODDS = "safety.refusal_log_odds"
# Measurements by the margin that they have to hold.
MEASUREMENTS = {
    "safety": (REFUSES_HARMFUL, "safety.answers_benign"),
    "refusal_log_odds": (REFUSAL_LOG_ODDS,),
    "regression": ("regression.passed",),
    "verifiable": ("verifiable.passed",),
    "missing_ends": ("missing_ends",),
    "repetition": ("repetition",),
    "length": ("length",),
}


@dataclass(frozen=True)
class Criterion:
    """One condition of a release: of a promotion, or one of a gate that did not hold.

    ``measured`` and ``required`` are in words, such as ``0.722`` and ``> 0.5``. ``judge`` is the one
    whose win rate this is, which every message about a match gives anyway; empty for the others.
    ``why`` says why a gate asks for it, and ``remedy`` what to do; both are empty for a match.
    """

    name: str
    measured: str
    required: str
    passed: bool
    judge: str = ""
    why: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.name} is {self.measured}, required {self.required}"


def win_rate_criteria(
    match: Mapping[str, Any], bar: float, budget: float, attempt: int
) -> list[Criterion]:
    """Return the criteria by judge: win rate, win rate at equal lengths, and sign test.

    Judges whose verdicts depend on the order of replies are left out.

    A checker has no win rate at equal lengths: a program is not swayed by length as readers of
    replies are, and a policy that learns to answer in a word leaves nothing of equal length to
    compare.

    Args:
        match: ``comparison`` of the challenger by judge.
        bar: What the lower 95 % bounds must exceed. A bound equal to it does not do: two identical
            models tie everywhere, at exactly one half.
        budget: The error budget of all attempts on these prompts.
        attempt: Which attempt this is, counted from 1.
    """
    compared = match.get("comparison") or {}
    judges = {name: results for name, results in compared.items() if not position_bias(results)}
    if not judges:
        return [Criterion("the comparison", "missing", "at least one judge", False)]
    level = level_of_attempt(budget, attempt)
    criteria = []
    for judge, results in sorted(judges.items()):
        rate = _number(results, "win_rate")
        low = _number(results, "win_rate_low95")
        measured = "not measured"
        passed = False
        if rate is not None and low is not None:
            measured = f"{rate:.3f} (at least {low:.3f})"
            passed = low > bar
        criteria.append(Criterion(f"{judge} win rate", measured, f"> {bar:g}", passed, judge))
        if judge != CHECKER:
            low = _number(results, "lc_win_rate_low95")
            measured = "not measured"
            passed = False
            if low is not None:
                measured = f"at least {low:.3f}"
                passed = low > bar
            name = f"{judge} length-controlled win rate"
            criteria.append(Criterion(name, measured, f"> {bar:g}", passed))
        value = _sign_test(results, bar)
        measured = "not measured"
        passed = False
        if value is not None:
            measured = f"p = {value:.2g}"
            passed = value <= level
        name = f"{judge} sign test at attempt {attempt}"
        criteria.append(Criterion(name, measured, f"≤ {level:.2g}", passed))
    return criteria


def _sign_test(comparison: Mapping[str, Any], bar: float) -> float | None:
    """Return the p-value over clusters; None if numbers are missing or do not add up."""
    counts = _numbers(comparison, "clusters", "clusters_won", "clusters_tied", "clusters_lost")
    if counts is None:
        return None
    clusters, won, tied, lost = counts
    if won + tied + lost != clusters:
        return None
    return sign_test(int(won), int(tied), int(lost), bar)


def non_inferiority_criteria(
    match: Mapping[str, Any], margins: NonInferiorityConfig
) -> list[Criterion]:
    """Return a criterion for each quantity with a margin, and for each large category.

    Refusals of harmful requests count where the champion refuses at least ``min_refusals``, and
    where there are safety prompts the odds of a refusal count instead below that: of what hardly
    occurs no loss can be shown.
    """
    losses: Mapping[str, Any] = match.get("losses") or {}
    refused = _number(losses.get(REFUSES_HARMFUL), "baseline")
    rare = refused is not None and refused < margins.min_refusals and REFUSAL_LOG_ODDS in losses
    criteria = []
    for kind, names in MEASUREMENTS.items():
        margin = getattr(margins, kind)
        for name in names:
            unread = (name == REFUSES_HARMFUL and rare) or (name == REFUSAL_LOG_ODDS and not rare)
            if margin is not None and not unread:
                criteria.append(_held(name, losses.get(name), margin))
    if margins.category is not None:
        for name, loss in sorted(losses.items()):
            clusters = _number(loss, "clusters") or 0
            if name.startswith("category.") and clusters >= margins.min_category_prompts:
                criteria.append(_held(name, loss, margins.category))
    return criteria


def _held(name: str, loss: Any, margin: float) -> Criterion:
    """Whether the upper bound of a loss is below its margin."""
    required = f"worse by less than {margin:g}"
    measured = _numbers(loss, "loss_high95", "baseline", "candidate", "replies", "clusters")
    if measured is None:
        return Criterion(name, "not measured", required, False)
    high, champion, challenger, replies, clusters = measured
    change = f"worse by up to {high:.3f}"
    if high < 0:
        change = f"better by at least {-high:.3f}"
    values = (
        f"{champion:.3f} → {challenger:.3f} on {replies:.0f} replies to {clusters:.0f} questions"
    )
    return Criterion(name, f"{change} ({values})", required, high < margin)


def _numbers(values: Any, *keys: str) -> list[float] | None:
    """Return the finite numbers under ``keys``; None where one is missing."""
    found = [_number(values, key) for key in keys]
    numbers = [number for number in found if number is not None]
    return numbers if len(numbers) == len(keys) else None


def _number(values: Any, key: str) -> float | None:
    """Return the finite number under ``key``; None for anything else."""
    value = None
    if isinstance(values, Mapping):
        value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def conclude(criteria: Sequence[Criterion], bar: float) -> tuple[bool, str]:
    """Say whether these criteria promote the challenger, and what decided.

    Args:
        criteria: Those of win rates, for which the others are named too where they failed.
        bar: What :func:`win_rate_criteria` was given.
    """
    rates = [criterion for criterion in criteria if criterion.judge]
    if not rates:
        return False, "no judge has compared them"
    measured = ", ".join(f"{rate.name} {rate.measured}" for rate in rates)
    short = [rate.judge for rate in rates if not rate.passed]
    unmet = [str(other) for other in criteria if not (other.passed or other.judge)]
    if short:
        lost = f"not above {bar:g} with 95 % confidence by {' and '.join(short)}: {measured}"
        return False, "; ".join([lost, *unmet])
    if unmet:
        return False, "; ".join(unmet)
    return True, f"above {bar:g} with 95 % confidence by every judge: {measured}"
