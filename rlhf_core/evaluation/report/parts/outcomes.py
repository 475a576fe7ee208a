"""Outcomes by category and group of prompts, and pairs of replies to read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

from markupsafe import Markup, escape

from rlhf_core.evaluation.comparisons.comparison import compare
from rlhf_core.evaluation.report.charts import Outcomes, outcome_chart
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


JUDGES = ("gold", "llm", "judge", "referee", "reward")
LLM_VERDICTS = {1.0: "the policy's reply is better", 0.5: "a tie", 0.0: "SFT's reply is better"}
WORDS = re.compile(r"\s+|\w+|[^\w\s]")


def spread_over_categories(rows: Sequence[JsonObject], count: int) -> list[JsonObject]:
    """Choose ``count`` rows: the first of each category, then the second of each, and so on; never the best ones."""
    groups: dict[str, list[JsonObject]] = {}
    for row in rows:
        groups.setdefault(str(row.get("category")), []).append(row)
    ordered = [
        group[rank]
        for rank in range(max((len(group) for group in groups.values()), default=0))
        for _, group in sorted(groups.items())
        if rank < len(group)
    ]
    return ordered[:count]


def reply_pair(row: Mapping[str, Any]) -> JsonObject:
    """Return a prompt with both replies, (judge, SFT's score, policy's score) triples, what the LLM judge said, and who
    wins by the best judge with scores.

    ``winner`` is ``policy``, ``sft`` or ``tie``, by the sign of the difference alone; empty without scores.
    """
    judges = [name for name in JUDGES if f"sft_{name}" in row and f"policy_{name}" in row]
    winner = ""
    if judges:
        gain = row[f"policy_{judges[0]}"] - row[f"sft_{judges[0]}"]
        winner = "policy" if gain > 0 else "sft" if gain < 0 else "tie"
    sft, policy = str(row.get("sft_reply", "")), str(row.get("policy_reply", ""))
    marked_sft, marked_policy = mark_differences(sft, policy)
    return {
        "category": row.get("category", ""),
        "prompt": row.get("prompt", ""),
        "sft": sft,
        "policy": policy,
        "sft_marked": marked_sft,
        "policy_marked": marked_policy,
        "sft_finished": row.get("sft_finished", True),
        "policy_finished": row.get("policy_finished", True),
        "winner": winner,
        "scores": [(name, row[f"sft_{name}"], row[f"policy_{name}"]) for name in judges],
        # It was asked about the first reply to each prompt; only then there is a reason, which may be empty.
        "llm": "" if row.get("llm_reason") is None else LLM_VERDICTS.get(row["llm_outcome"], "no usable answer"),
        "llm_reason": row.get("llm_reason") or "",
    }


def mistaken_pair(row: Mapping[str, Any]) -> JsonObject:
    """Return a pair that the reward model ranks wrongly, with the words marked in which its replies differ."""
    chosen, rejected = mark_differences(str(row.get("chosen", "")), str(row.get("rejected", "")))
    return {**row, "chosen_marked": chosen, "rejected_marked": rejected}


def mark_differences(first: str, second: str) -> tuple[Markup, Markup]:
    """Escape both texts and put ``<mark>`` around the words that the other one does not have at that place."""
    pieces = [WORDS.findall(text) for text in (first, second)]
    marked: tuple[list[str], list[str]] = ([], [])
    for kind, *spans in SequenceMatcher(a=pieces[0], b=pieces[1], autojunk=False).get_opcodes():
        for side, (start, end) in enumerate((spans[:2], spans[2:])):
            text = escape("".join(pieces[side][start:end]))
            if text:
                marked[side].append(text if kind == "equal" else f"<mark>{text}</mark>")
    return Markup("".join(marked[0])), Markup("".join(marked[1]))


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
