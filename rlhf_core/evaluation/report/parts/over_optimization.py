"""Over-optimisation: what reward model and judges say as the policy moves away from SFT (Gao et al. 2022).

A reward that goes on rising where the judges' scores fall is the sign that the policy exploits the reward model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from rlhf_core.evaluation.report.charts import Point, Series, line_chart
from rlhf_core.evaluation.report.sources import JsonObject

TRAINING = {"reward": "reward_mean", "referee": "referee_mean"}
JUDGED = ("judge", "gold")


def over_optimization_chart(
    history: Sequence[Mapping[str, Any]], evaluation: Mapping[str, Any], rows: Sequence[JsonObject]
) -> Markup | None:
    """Draw gains in standard deviations of SFT's scores against √KL; None without KL or scores.

    Reward model and referee are known in every iteration of PPO, as gains over the first; judge and gold score only the
    policy that was selected, as dots.
    """
    spread = {
        name: float(np.std([row[f"sft_{name}"] for row in rows])) or 1.0
        for name in (*TRAINING, *JUDGED)
        if rows and f"sft_{name}" in rows[0]
    }
    series = []
    for name, metric in TRAINING.items():
        known = [(row["kl"], row[metric]) for row in history if _finite(row.get("kl")) and _finite(row.get(metric))]
        if known and name in spread:
            gains: list[Point] = [
                (math.sqrt(max(kl, 0.0)), (score - known[0][1]) / spread[name]) for kl, score in known
            ]
            label = {"reward": "reward model", "referee": "referee"}[name]
            series.append(Series(f"{label}, in training", gains, scattered=True))
    if not series:
        return None
    sft, policy = evaluation.get("sft", {}), evaluation.get("policy", {})
    for name in JUDGED:
        if name in spread and name in policy and _finite(evaluation.get("kl")):
            gain = (policy[name] - sft[name]) / spread[name]
            series.append(Series(f"{name}, selected policy", [(math.sqrt(max(evaluation["kl"], 0.0)), gain)]))
    return line_chart(series, x_label="√KL from SFT, nats", title="gain in score against the distance from SFT")


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
