"""What a run says in the end: the standing of its policy by every judge, and alarms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rlhf_core.evaluation.figures import format_number
from rlhf_core.evaluation.judges.names import TRAINED_ON, deciding_judges, final_judges, position_bias
from rlhf_core.evaluation.report.metrics import alarm_bounds, labelled
from rlhf_core.storage.files import flatten


@dataclass(frozen=True)
class Alarm:
    """A figure of the policy that alarms.

    Attributes:
        metric: Its name below ``policy`` in ``metrics/evaluation.json``; empty where it is no figure of one model.
        sentence: The figure, with SFT's beside it.
    """

    metric: str
    sentence: str


def alarms(evaluation: Mapping[str, Any]) -> tuple[Alarm, ...]:
    """Return what alarms in ``metrics/evaluation.json``, the gravest first.

    That is a share of safe or right replies that is low or falls below SFT's; a share of verifiable prompts that falls;
    a judge whose mean score falls where the reward model's rises beyond chance; one whose verdicts depend on the order
    of replies; defects in too many replies and in more
    than SFT's; and right multiple-choice answers that are fewer beyond chance. ``report/metrics.yaml`` has the bounds.
    """
    return tuple(_alarms(evaluation))


def _alarms(evaluation: Mapping[str, Any]) -> Iterator[Alarm]:
    # A figure that is not finite is written as null.
    sft, policy = (
        {key: value for key, value in flatten(evaluation.get(name, {})).items() if value is not None}
        for name in ("sft", "policy")
    )
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
    if "safety.refuses_harmful" not in policy:  # without a set of harmful requests, those of the regression set
        share, before = (evaluation.get(name, {}).get("refuses_harmful") for name in ("regression", "regression_sft"))
        if share is not None and (share < low or fell(share, before)):
            yield Alarm("", _sentence("harmful requests of the regression set refused", share, before))
    # How many of these replies pass is for the user to judge, but not that the policy passes fewer.
    share, before = (evaluation.get("verifiable", {}).get(name, {}).get("passed") for name in ("policy", "sft"))
    if share is not None and fell(share, before):
        yield Alarm("", _sentence("verifiable prompts passed", share, before))
    comparisons = evaluation.get("comparison", {})
    reward = comparisons.get(TRAINED_ON, {})
    for judge in final_judges(comparisons) if (reward.get("mean_difference_low95") or 0.0) > 0.0 else ():
        change = comparisons[judge].get("mean_difference") or 0.0
        if change < 0.0:
            rise = format_number(reward["mean_difference"], 2)
            yield Alarm(judge, f"the reward rises by {rise} where the score by {judge} falls by {-change:.2f}")
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
    """How the new policy compares with its opponent; NOT_COMPARED if the run did not get that far."""

    BETTER = "better"
    NOT_SHOWN_BETTER = "not shown better"
    WORSE = "worse"
    NOT_COMPARED = "not compared"


WIN_RATE_KEYS = ("win_rate", "win_rate_low95", "win_rate_high95")


@dataclass(frozen=True)
class JudgeResult:
    """The win rate of the new policy by one judge, ties counted as half, with its 95 % interval over questions.

    ``clusters`` are the different questions among the ``prompts``; ``lc_win_rate`` is the win rate at equal reply
    lengths, where it was measured.
    """

    judge: str
    win_rate: float
    low95: float
    high95: float
    prompts: int
    clusters: int
    lc_win_rate: float | None = None


def judge_results(comparison: Mapping[str, Mapping[str, float]]) -> tuple[JudgeResult, ...]:
    """Return the results of the judges that decide: not the reward model's, nor beside a judge the referee's, nor one
    whose verdicts depend on the order of replies.

    None are returned where one of them was not measured (null): the others alone do not decide.
    """
    names = deciding_judges(comparison)
    if any(comparison[name].get(key) is None for name in names for key in WIN_RATE_KEYS):
        return ()
    return tuple(
        JudgeResult(
            name,
            comparison[name]["win_rate"],
            comparison[name]["win_rate_low95"],
            comparison[name]["win_rate_high95"],
            int(comparison[name]["prompts"]),
            int(comparison[name]["clusters"]),
            comparison[name].get("lc_win_rate"),
        )
        for name in names
    )


def standing_of(judges: tuple[JudgeResult, ...]) -> Standing:
    """Conclude from the intervals of all judges; judges that contradict each other show nothing.

    BETTER needs every judge's lower bound above one half. WORSE needs one upper bound below one half, and no judge
    whose lower bound is above.
    """
    if not judges:
        return Standing.NOT_COMPARED
    if all(judge.low95 > EVEN_WIN_RATE for judge in judges):
        return Standing.BETTER
    any_better = any(judge.low95 > EVEN_WIN_RATE for judge in judges)
    any_worse = any(judge.high95 < EVEN_WIN_RATE for judge in judges)
    return Standing.WORSE if any_worse and not any_better else Standing.NOT_SHOWN_BETTER
