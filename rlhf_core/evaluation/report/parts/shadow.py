"""Shadow mode in the report: recorded requests that another policy answered, beside what users got."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from rlhf_core.evaluation.replies.replayed import ReplayOutcome
from rlhf_core.evaluation.report.charts import Outcomes, outcome_chart
from rlhf_core.evaluation.report.parts.reply_pairs import mark_differences
from rlhf_core.evaluation.report.sources import JsonObject

MOST = 5
TEXT_METRICS = {
    "words": "Words per reply",
    "repetition": "Repeated trigrams",
    "distinct_2": "Distinct bigrams",
    "missing_eos": "Missing end",
}


def shadow_replays(outcomes: Sequence[ReplayOutcome]) -> list[JsonObject]:
    """What the template shows of the newest outcomes."""
    return [_replay(outcome) for outcome in outcomes[:MOST]]


def _replay(outcome: ReplayOutcome) -> JsonObject:
    margin = float(outcome.comparison.get("tie_margin", 0.0))
    return {
        "policy": outcome.policy,
        "record": outcome.record,
        "day": outcome.time.partition("T")[0],
        "requests": outcome.requests,
        "models": sorted(outcome.models.items()),
        "skipped": outcome.skipped,
        "judge": outcome.judge,
        "comparison": dict(outcome.comparison),
        "chart": _chart(outcome),
        "texts": [
            (label, outcome.recorded_text[name], outcome.replayed_text[name])
            for name, label in TEXT_METRICS.items()
            if name in outcome.recorded_text and name in outcome.replayed_text
        ],
        "replies": [_pair(row, margin) for row in outcome.replies],
    }


def _chart(outcome: ReplayOutcome) -> Markup | None:
    result = outcome.comparison
    if not result:
        return None
    row = Outcomes(
        f"by the {outcome.judge}",
        result["lose"],
        result["tie"],
        result["win"],
        result["win_rate"],
        result["win_rate_low95"],
        result["win_rate_high95"],
        int(result["prompts"]),
    )
    title = f"{outcome.policy} against the recorded replies"
    return outcome_chart([row], title, "the recorded reply", outcome.policy)


def _pair(row: Any, tie_margin: float) -> JsonObject:
    before, after = str(row["recorded"]), str(row["replayed"])
    marked_before, marked_after = mark_differences(before, after)
    scores = list(row.get("scores") or [])
    winner = ""
    if scores:
        gain = scores[1] - scores[0]
        winner = "tie" if abs(gain) <= tie_margin else "replayed" if gain > 0 else "recorded"
    return {
        "prompt": row["prompt"],
        "sides": [
            ("Recorded", before, marked_before, scores[0] if scores else None),
            ("Replayed", after, marked_after, scores[1] if scores else None),
        ],
        "winner": winner,
    }
