"""Wins, ties and losses by category of prompt, from the judged pairs of replies."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_core.evaluation.comparisons.comparison import compare
from rlhf_core.evaluation.report.charts import Outcomes
from rlhf_core.evaluation.report.sources import JsonObject

BOOTSTRAP = 500


def category_outcomes(rows: Sequence[JsonObject], judge: str, tie_margin: float) -> list[Outcomes]:
    """Compare policy and SFT by ``judge`` in each category, with bounds over its prompts; the policy's worst first.

    Args:
        rows: Rows of ``samples/comparisons.parquet``; those of a category have equally many replies to each prompt.
        judge: The judge whose scores they have.
        tie_margin: Largest difference of scores that is a tie.
    """
    categories: dict[str, dict[str, list[JsonObject]]] = {}
    for number, row in enumerate(rows):
        prompts = categories.setdefault(str(row.get("category", "")), {})
        prompts.setdefault(str(row.get("id", number)), []).append(row)
    outcomes = []
    for category, prompts in categories.items():
        policy, sft = (
            [[row[f"{side}_{judge}"] for row in replies] for replies in prompts.values()] for side in ("policy", "sft")
        )
        versus = compare(policy, sft, tie_margin, BOOTSTRAP)
        outcomes.append(
            Outcomes(
                category,
                versus.lose,
                versus.tie,
                versus.win,
                versus.win_rate,
                versus.win_rate_low95,
                versus.win_rate_high95,
                versus.prompts,
            )
        )
    return sorted(outcomes, key=lambda row: row.win_rate)
