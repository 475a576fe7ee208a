"""Wins, ties and losses on helpful and on harmless prompts, and against third parties (paper, figures 10 and 11)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from rlhf_core.evaluation.report.charts import Outcomes, outcome_chart
from rlhf_core.evaluation.report.parts.reply_pairs import JUDGES
from rlhf_core.evaluation.report.sources import JsonObject


def group_chart(groups: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Markup | None:
    """Draw the policy against SFT by group and judge; None without groups."""
    rows = [
        _row(f"{group}, {judge}", comparison)
        for group, by_judge in groups.items()
        for judge, comparison in _best_judge_first(by_judge)
    ]
    return outcome_chart(rows, "wins, ties and losses on helpful and harmless prompts") if rows else None


def opponent_charts(opponents: Mapping[str, Mapping[str, Any]]) -> list[JsonObject]:
    """Return each opponent with its chart of SFT and policy against it, by judge, in all and by group."""
    charts = []
    for name, opponent in opponents.items():
        judges = [judge for judge, _ in _best_judge_first(opponent["policy"]["comparison"])]
        rows = []
        for judge in judges:
            for side, label in (("sft", "SFT"), ("policy", "policy")):
                parts = {"": opponent[side]["comparison"], **opponent[side]["group"]}
                rows += [
                    _row(", ".join(part for part in (label, group, judge) if part), by_judge[judge])
                    for group, by_judge in parts.items()
                    if judge in by_judge
                ]
        chart = outcome_chart(rows, f"wins, ties and losses against {name}", name, "our side")
        charts.append(
            {"name": name, "chart": chart, **{key: opponent[key] for key in ("prompts", "missing", "unused")}}
        )
    return charts


def _best_judge_first(by_judge: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return sorted(by_judge.items(), key=lambda row: JUDGES.index(row[0]) if row[0] in JUDGES else len(JUDGES))


def _row(label: str, comparison: Mapping[str, Any]) -> Outcomes:
    return Outcomes(
        label,
        comparison["lose"],
        comparison["tie"],
        comparison["win"],
        comparison["win_rate"],
        comparison["win_rate_low95"],
        comparison["win_rate_high95"],
        comparison["prompts"],
    )
