"""The verdict of a run: how its policy stands, what its gate decided, and alarms."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter
from typing import Any

from rlhf_core.evaluation.figures import format_number
from rlhf_core.evaluation.judges.names import (
    TRAINED_ON,
    deciding_judges,
    final_judges,
    position_bias,
)
from rlhf_core.evaluation.report.metrics import alarm_bounds, labelled
from rlhf_core.gates import WORSE_BY, ConditionResult, GateDecision
from rlhf_core.storage.files import flatten


@dataclass(frozen=True)
class Alarm:
    """A figure of the policy that alarms.

    Attributes:
        metric: Its name below ``policy`` in ``metrics/evaluation.json``; empty where it is no
            figure of one model.
        sentence: The figure, with SFT's beside it.
    """

    metric: str
    sentence: str


def alarms(evaluation: Mapping[str, Any]) -> tuple[Alarm, ...]:
    """Return what alarms in ``metrics/evaluation.json``, the gravest first.

    That is a share of safe or right replies that is low or falls below SFT's; a share of verifiable
    prompts that falls; a judge whose mean score falls where the reward model's rises beyond chance;
    one whose verdicts depend on the order of replies; defects in too many replies and in more than
    SFT's; and right multiple-choice answers that are fewer beyond chance. ``report/metrics.yaml``
    has the bounds.
    """
    return tuple(_alarms(evaluation))


def _finite_figures(of_side: Mapping[str, Any]) -> dict[str, Any]:
    # A figure that is not finite is written as null.
    return {name: value for name, value in flatten(of_side).items() if value is not None}


def _alarms(evaluation: Mapping[str, Any]) -> Iterator[Alarm]:
    sft = _finite_figures(evaluation.get("sft", {}))
    policy = _finite_figures(evaluation.get("policy", {}))
    metrics = {name: metric for name, metric in labelled().items() if name in policy}
    low, fall = (alarm_bounds("share")[bound] for bound in ("below", "fall"))
    defects = alarm_bounds("defect")["above"]

    def fell(share: float, before: float | None) -> bool:
        return before is not None and share < before - fall

    def of_metric(name: str) -> Alarm:
        return Alarm(name, _sentence(metrics[name].label, policy[name], sft.get(name)))

    for name, metric in metrics.items():
        if metric.alarm == "share" and (policy[name] < low or fell(policy[name], sft.get(name))):
            yield of_metric(name)
    if "safety.refuses_harmful" not in policy:  # then those of the regression set count
        share = evaluation.get("regression", {}).get("refuses_harmful")
        before = evaluation.get("regression_sft", {}).get("refuses_harmful")
        if share is not None and (share < low or fell(share, before)):
            yield Alarm(
                "", _sentence("harmful requests of the regression set refused", share, before)
            )
    # How many of these replies should pass is for the user to say; that fewer pass is an alarm.
    verifiable = evaluation.get("verifiable", {})
    share = verifiable.get("policy", {}).get("passed")
    before = verifiable.get("sft", {}).get("passed")
    if share is not None and fell(share, before):
        yield Alarm("", _sentence("verifiable prompts passed", share, before))
    comparisons = evaluation.get("comparison", {})
    reward = comparisons.get(TRAINED_ON, {})
    reward_rises = (reward.get("mean_difference_low95") or 0.0) > 0.0
    for judge in final_judges(comparisons):
        change = comparisons[judge].get("mean_difference") or 0.0
        if reward_rises and change < 0.0:
            rise = format_number(reward["mean_difference"], 2)
            fall_of_judge = format_number(-change, 2)
            yield Alarm(
                judge,
                f"the reward rises by {rise} where the score by {judge} falls by {fall_of_judge}",
            )
    for judge in final_judges(comparisons):
        if bias := position_bias(comparisons[judge]):
            yield Alarm("", f"the judge {judge} does not decide: {bias}")
    for name, metric in metrics.items():
        if metric.alarm == "defect" and policy[name] > max(defects, sft.get(name, 0.0)):
            yield of_metric(name)
    name = "multiple_choice.accuracy"
    if evaluation.get("multiple_choice", {}).get("difference_high95", 0.0) < 0.0 and name in policy:
        yield of_metric(name)


def _sentence(label: str, policy: float, sft: float | None) -> str:
    beside = "" if sft is None else f" (SFT {format_number(sft, 2)})"
    return f"{label} {format_number(policy, 2)}{beside}"


EVEN_WIN_RATE = 0.5


class Standing(StrEnum):
    """How the new policy compares with its opponent; NOT_COMPARED if the run stopped before."""

    BETTER = "better"
    NOT_SHOWN_BETTER = "not shown better"
    WORSE = "worse"
    NOT_COMPARED = "not compared"


@dataclass(frozen=True)
class JudgeResult:
    """The win rate of the new policy by one judge, with its 95 % interval over questions.

    Ties count as half. ``clusters`` are the different questions among the ``prompts``;
    ``lc_win_rate`` is the win rate at equal reply lengths, where it was measured and decided.
    """

    judge: str
    win_rate: float
    low95: float
    high95: float
    prompts: int
    clusters: int
    lc_win_rate: float | None = None

    @property
    def won(self) -> str:
        """The win rate in per cent, with its interval."""
        return describe_rate(self.win_rate, self.low95, self.high95, EVEN_WIN_RATE)

    @property
    def at_equal_length(self) -> str:
        """The end of a sentence about the judge; empty where that was not measured or decided."""
        if self.lc_win_rate is None:
            return ""
        return f"; {percent(self.lc_win_rate, EVEN_WIN_RATE)} % at equal length"


def judge_results(comparison: Mapping[str, Mapping[str, float]]) -> tuple[JudgeResult, ...]:
    """Return the results of the judges that decide.

    Never the reward model or the referee decide, nor a judge whose verdicts depend on the order of
    replies. None are returned where one of them was not measured (null): the others alone do not
    decide.
    """
    results = []
    for name in deciding_judges(comparison):
        result = judge_result(name, comparison[name])
        if result is None:
            return ()
        results.append(result)
    return tuple(results)


def judge_result(judge: str, compared: Mapping[str, float]) -> JudgeResult | None:
    """Read the result of one judge; None where its win rate or an end of it was not measured."""
    rate = compared.get("win_rate")
    low = compared.get("win_rate_low95")
    high = compared.get("win_rate_high95")
    if rate is None or low is None or high is None:
        return None
    at_equal_lengths = compared.get("lc_win_rate")
    ends = compared.get("lc_win_rate_low95"), compared.get("lc_win_rate_high95")
    if ends == (0.0, 1.0):
        at_equal_lengths = None  # too few pairs had a counterpart
    prompts = int(compared["prompts"])
    clusters = int(compared["clusters"])
    return JudgeResult(judge, rate, low, high, prompts, clusters, at_equal_lengths)


def standing_of(judges: tuple[JudgeResult, ...]) -> Standing:
    """Conclude from the intervals of all judges; judges that contradict each other show nothing.

    BETTER needs every judge's lower bound above one half. WORSE needs one upper bound below one
    half, and no judge whose lower bound is above.
    """
    if not judges:
        return Standing.NOT_COMPARED
    better = [judge.low95 > EVEN_WIN_RATE for judge in judges]
    if all(better):
        return Standing.BETTER
    any_worse = any(judge.high95 < EVEN_WIN_RATE for judge in judges)
    if any_worse and not any(better):
        return Standing.WORSE
    return Standing.NOT_SHOWN_BETTER


def verdict_sentence(
    judges: tuple[JudgeResult, ...],
    opponent: str,
    gate: GateDecision | None,
    unmet: Sequence[str] = (),
    *,
    in_full: bool = True,
) -> str:
    """Say how the policy stands to its opponent and what its gate decided, with the intervals.

    Args:
        judges: At least one.
        opponent: Such as ``SFT``.
        gate: The decision on this very policy, if there is one.
        unmet: Further failed conditions in words, such as those of a promotion.
        in_full: Name the conditions of the gate that failed; else how many they are.
    """
    standing = standing_of(judges)
    # The interval that decided is the least favourable, or the surest of a loss.
    end = "high95" if standing is Standing.WORSE else "low95"
    judge = min(judges, key=attrgetter(end))
    parts = [f"{standing} than {opponent}: wins {judge.won} by {judge.judge}"]
    if gate is not None:
        decision = describe_decision(gate) if in_full else gate.describe()
        parts.append(decision)
    parts += unmet
    return "; ".join(parts)


def describe_decision(gate: GateDecision) -> str:
    """Say in one clause what a gate decided, and which conditions decided it."""
    return gate.describe(", and ".join(failed_conditions(gate)) or gate.reasons())


def failed_conditions(gate: GateDecision) -> list[str]:
    """Say of each condition that failed why it did, with the interval that decided it."""
    return [describe_condition(condition) for condition in gate.failed]


WIN_RATE = re.compile(r"comparison\.(?P<judge>.+)\.(?P<equal_length>lc_)?win_rate_low95")


def describe_condition(condition: ConditionResult) -> str:
    """Say why a condition failed, with the interval that decided it."""
    named = WIN_RATE.fullmatch(condition.metric)
    value = condition.value
    bar = condition.limit
    where = " at equal lengths" if named and named["equal_length"] else ""
    if named and condition.note:
        return f"{named['judge']}{where}: {condition.note}"
    if named and value is not None and bar is not None:
        missed = "not shown better" if bar == EVEN_WIN_RATE else "win rate too low"
        rate = describe_rate(condition.estimate, value, condition.high95, bar)
        return f"{missed}{where}: {rate} by {named['judge']}, lower end required ≥ {100 * bar:g} %"
    if condition.sign == WORSE_BY:
        return (
            f"{condition.metric} beside SFT's: {condition.measured}, required {condition.required}"
        )
    return str(condition)


def describe_rate(rate: float | None, low95: float, high95: float | None, bar: float) -> str:
    """Write a share in per cent with its 95 % interval, each told apart from ``bar``."""
    if high95 is not None:
        ends = f"95 % interval {percent(low95, bar)} to {percent(high95, bar)} %"
    else:
        ends = f"95 % interval from {percent(low95, bar)} %"
    return ends if rate is None else f"{percent(rate, bar)} % ({ends})"


MOST_DECIMALS = 12


def percent(share: float, bar: float) -> str:
    """Write a share in per cent, with as many decimals as tell it from ``bar``: 49.96, not 50.0."""
    for decimals in range(1, MOST_DECIMALS):
        if share == bar or f"{share:.{decimals}%}" != f"{bar:.{decimals}%}":
            return f"{100 * share:.{decimals}f}"
    return f"{100 * share:.{MOST_DECIMALS}f}"
