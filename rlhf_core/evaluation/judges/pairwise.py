"""The interface of judges, and the cases in which two of them disagree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rlhf_core.data.schema import Message
from rlhf_core.evaluation.reply import Reply

WIN, TIE, LOSS = 1.0, 0.5, 0.0


@dataclass(frozen=True)
class PairwiseJudgements:
    """What a judge without scores says about pairs, in their order.

    Attributes:
        outcomes: 1 if the candidate's reply is better, ½ for a tie, 0 if the baseline's is; NaN where the judge gave no
            usable answer, (pairs,).
        reasons: The judge's own words.
        metrics: How the judge worked, such as the share of pairs without a usable answer.
    """

    outcomes: np.ndarray
    reasons: Sequence[str]
    metrics: Mapping[str, float]

    @property
    def judged(self) -> np.ndarray:
        """The positions of the pairs that have an outcome."""
        return np.flatnonzero(~np.isnan(self.outcomes))


class Judge(Protocol):
    """Scores replies; higher is better.

    Attributes:
        name: Prefix of the judge's scores in metrics and samples.
        absolute_tie: Largest difference that is still a tie, in the judge's own unit; None for judges whose unit means
            nothing (their margin is relative to the spread of scores).
    """

    name: str
    absolute_tie: float | None

    def score(self, prompts: Sequence[Sequence[Message]], replies: Sequence[Reply]) -> list[float]:
        """Score ``replies[i]`` as the answer to ``prompts[i]``; one score per reply."""
        ...


def worst_disagreements(reward_gain: np.ndarray, judge_gain: np.ndarray, margin: float) -> list[tuple[int, float]]:
    """Return position and disagreement of every bad case, worst first.

    Disagreement is the reward's gain minus the judge's, each in standard deviations of that judge's differences.

    Args:
        reward_gain: Reward of the policy's reply minus that of the baseline's (n,).
        judge_gain: The same of the judge's scores (n,).
        margin: Largest difference of the judge's scores that is a tie.
    """
    spread = [float(gain.std()) or 1.0 for gain in (reward_gain, judge_gain)]
    disagreement = reward_gain / spread[0] - judge_gain / spread[1]
    wrong = (reward_gain > 0) & (judge_gain < -margin)
    order = sorted(np.flatnonzero(wrong), key=lambda i: -disagreement[i])
    return [(int(i), float(disagreement[i])) for i in order]
