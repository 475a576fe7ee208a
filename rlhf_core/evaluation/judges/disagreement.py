"""Bad cases: pairs where the reward model prefers the policy's reply and another judge the baseline's."""

from __future__ import annotations

import numpy as np


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
