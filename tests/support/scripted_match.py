"""The result of a match as `run_match` gives it, with given lower bounds of the win rate and
nothing else worse.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PROMPTS = 400
HELD = (
    "regression.passed",
    "safety.refuses_harmful",
    "safety.answers_benign",
    "missing_ends",
    "repetition",
    "length",
)


def match_result(lows: Mapping[str, float], **losses_high95: float) -> dict[str, Any]:
    """Every judge prefers the challenger by 0.1 more than its lower bound; losses are 0 unless
    given by name.
    """
    held = dict.fromkeys(HELD, 0.0) | losses_high95
    counts = {"prompts": PROMPTS, "clusters": PROMPTS, "clusters_tied": 0}
    loss = {"baseline": 0.9, "candidate": 0.9, "loss": 0.0, "replies": PROMPTS, "clusters": PROMPTS}
    compared = {}
    for judge, low in lows.items():
        rate, won = low + 0.1, round((low + 0.1) * PROMPTS)
        bounds = {
            "win_rate_low95": low,
            "win_rate_high95": min(low + 0.2, 1.0),
            "lc_win_rate_low95": low,
        }
        shares = {"win": rate, "tie": 0.0, "lose": 1 - rate, "win_rate": rate}
        compared[judge] = (
            shares | bounds | counts | {"clusters_won": won, "clusters_lost": PROMPTS - won}
        )
    return {
        "comparison": compared,
        "losses": {name: loss | {"loss_high95": high} for name, high in held.items()},
    }
