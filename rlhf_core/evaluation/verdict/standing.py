"""Whether a policy is better than its opponent: what the judges that decide conclude from their intervals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from rlhf_core.evaluation.judges.final import final_judges

EVEN_WIN_RATE = 0.5


class Standing(StrEnum):
    """How the new policy compares with its opponent; NOT_COMPARED if the run did not get that far."""

    BETTER = "better"
    NOT_SHOWN_BETTER = "not shown better"
    WORSE = "worse"
    NOT_COMPARED = "not compared"


@dataclass(frozen=True)
class JudgeResult:
    """The win rate of the new policy by one judge, ties counted as half, with its 95 % interval over prompts.

    ``lc_win_rate`` is the win rate at equal reply lengths; evaluations of earlier versions have none.
    """

    judge: str
    win_rate: float
    low95: float
    high95: float
    prompts: int
    lc_win_rate: float | None = None


def judge_results(comparison: Mapping[str, Mapping[str, float]]) -> tuple[JudgeResult, ...]:
    """Return the results of the judges that decide: not the reward model's, nor beside a judge the referee's."""
    return tuple(
        JudgeResult(
            name,
            comparison[name]["win_rate"],
            comparison[name]["win_rate_low95"],
            comparison[name]["win_rate_high95"],
            int(comparison[name]["prompts"]),
            comparison[name].get("lc_win_rate"),
        )
        for name in final_judges(comparison)
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
