"""The note of a run in Markdown: its verdict with judges, figures and alarms.

MLflow and Prefect show it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.config.loading import load_params
from rlhf_core.config.profiles import profile_names
from rlhf_core.errors import RlhfError
from rlhf_core.evaluation.remedies import remedies
from rlhf_core.evaluation.report.headline import MEANINGS, sentence_case
from rlhf_core.evaluation.verdict import (
    EVEN_WIN_RATE,
    JudgeResult,
    alarms,
    failed_conditions,
    judge_results,
    percent,
    verdict_sentence,
)
from rlhf_core.gates import GateDecision
from rlhf_core.tracking.pipeline_run import NOTE_TAG, VERDICT_TAG

SFT = "SFT"
KL_KEYS = ("kl", "kl_low95", "kl_high95")
TOYS = frozenset(
    {"smoke", "chinese-sample"}
)  # profiles that try every step, and whose quality is no claim
TOY = (
    "{toy} is a toy: it tries every step, and its quality is no claim, so alarms are to be expected. "
    '"Better" is about {opponent}, by the judges above; "promoted" is about the champion, and a first version has none '
    "to beat"
)


@dataclass(frozen=True)
class KlEstimate:
    """KL of the new policy from SFT in nats per reply, with its 95 % interval."""

    mean: float
    low95: float
    high95: float

    @classmethod
    def of(cls, evaluation: Mapping[str, Any]) -> KlEstimate | None:
        """Read it from ``metrics/evaluation.json``, where a figure that is not finite is null."""
        kl = [evaluation[key] for key in KL_KEYS if evaluation.get(key) is not None]
        return cls(*kl) if len(kl) == len(KL_KEYS) else None


def verdict_note(workspace: Path, opponent: str) -> str:
    """Say what a verdict is worth in a workspace of one of :data:`TOYS`, and what SFT is where nothing
    was fine-tuned; empty for any other.
    """
    notes: list[str] = []
    with suppress(RlhfError):  # params.yaml may have been edited since the run began
        params = load_params(workspace)
        if params.sft.steps == 0:
            notes.append(
                f"SFT is the starting model as it was (sft.steps: 0): {params.base.source}"
            )
        toy = next((name for name in profile_names(params.profile) if name in TOYS), None)
        if toy is not None:
            notes.append(TOY.format(toy=toy, opponent=opponent))
    return "; ".join(notes)


def judged_facts(
    failed: Sequence[str],
    judges: Sequence[JudgeResult],
    kl: KlEstimate | None,
    alarming: Sequence[str],
) -> list[tuple[str, str]]:
    """Return what was judged as pairs of label and text, which terminal and Markdown both show."""
    facts = [("failed", condition) for condition in failed]
    for judge in judges:
        counted = f"{judge.prompts} prompts about {judge.clusters} questions"
        text = f"{judge.judge}: win rate {judge.won}, {counted}{judge.at_equal_length}"
        facts.append(("judges", text))
    for judge in judges:
        if judge.judge in MEANINGS:
            facts.append(("", f"{judge.judge} is {MEANINGS[judge.judge]}"))
    if kl is not None:
        interval = f"95 % interval {kl.low95:z.2f} to {kl.high95:z.2f}"
        facts.append(("KL", f"{kl.mean:z.2f} nats per reply from SFT, {interval}"))
    return facts + [("alarms", alarm) for alarm in alarming]


def verdict_tags(
    workspace: Path, evaluation: Mapping[str, Any], gate: GateDecision | None
) -> dict[str, str]:
    """Return the verdict on the policy and its note, as tags of a run in MLflow.

    There are none where no judge compared the policy with SFT.

    Args:
        evaluation: ``metrics/evaluation.json``.
        gate: What the policy gate decided on it.
    """
    judges = judge_results(evaluation.get("comparison", {}))
    if not judges:
        return {}
    alarming = [alarm.sentence for alarm in alarms(evaluation)]
    failed = [] if gate is None else failed_conditions(gate)
    facts = judged_facts(failed, judges, KlEstimate.of(evaluation), alarming)
    facts.append(("note", verdict_note(workspace, SFT)))
    if gate is not None:
        facts += [("to do", remedy) for remedy in remedies(gate)]
    summary = verdict_sentence(judges, SFT, gate, in_full=False)
    return {
        VERDICT_TAG: verdict_sentence(judges, SFT, gate),
        NOTE_TAG: note_of(summary, judges, facts),
    }


SPECIAL = re.compile(r"([\\`*|\[\]])")
REPLACED = {">=": "≥", "<=": "≤", "<": "&lt;", ">": "&gt;"}


def markdown_text(text: str) -> str:
    """Return ``text`` on one line so that Markdown shows it as it is, with ≥ and ≤ as signs."""
    escaped = SPECIAL.sub(r"\\\1", " ".join(text.split()))
    for characters, replacement in REPLACED.items():
        escaped = escaped.replace(characters, replacement)
    return escaped


JUDGE_COLUMNS = ("judge", "win rate", "95 % interval", "at equal length", "prompts", "questions")
# How Markdown begins a fact whose label is not simply capitalised.
MARKDOWN_LABELS = {"KL": "KL:", "alarms": "**Read before release:**"}


def judges_table(judges: Sequence[JudgeResult]) -> str:
    """The results of judges as a table in Markdown."""
    rows = []
    for judge in judges:
        shares = (judge.win_rate, judge.low95, judge.high95)
        rate, low, high = (f"{percent(share, EVEN_WIN_RATE)} %" for share in shares)
        equal = ""
        if judge.lc_win_rate is not None:
            equal = f"{percent(judge.lc_win_rate, EVEN_WIN_RATE)} %"
        name = markdown_text(judge.judge)
        rows.append((name, rate, f"{low} to {high}", equal, judge.prompts, judge.clusters))
    return markdown_table(JUDGE_COLUMNS, rows)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown, whose cells are Markdown."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for row in rows:
        lines.append("| " + " | ".join(map(str, row)) + " |")
    return "\n".join(lines)


def note_of(
    headline: str,
    judges: Sequence[JudgeResult],
    facts: Iterable[tuple[str, str]],
    points: Sequence[str] = (),
) -> str:
    """Write the note: the headline, the judges as a table, and the facts as a list.

    Args:
        facts: Pairs of label and text; of those without text nothing is said.
        points: What follows the facts, in Markdown.
    """
    blocks = [f"**{markdown_text(sentence_case(headline))}**"]
    if judges:
        blocks.append(judges_table(judges))
    listed = []
    for label, text in facts:
        if label == "judges" or not text:  # the table has the judges
            continue
        point = markdown_text(text)
        if label:
            point = f"{MARKDOWN_LABELS.get(label, f'{label.capitalize()}:')} {point}"
        listed.append(f"- {point}")
    return "\n\n".join([*blocks, "\n".join([*listed, *points])])
