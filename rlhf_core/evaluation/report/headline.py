"""The head of the report: verdict, headline numbers, and what was released."""

from __future__ import annotations

import csv
import io
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.config.gates import CHECKER
from rlhf_core.evaluation.figures import format_interval, format_number
from rlhf_core.evaluation.judges.names import GOLD, JUDGE
from rlhf_core.evaluation.promotion import Criterion
from rlhf_core.evaluation.remedies import remedies
from rlhf_core.evaluation.report.sources import JsonObject, failed_gate
from rlhf_core.evaluation.verdict import (
    JudgeResult,
    Standing,
    alarms,
    describe_decision,
    judge_results,
    standing_of,
    verdict_sentence,
)
from rlhf_core.gates import GateDecision
from rlhf_core.storage.files import atomic_write_text, flatten
from rlhf_core.tracking.pipeline_run import HEADLINE

# `dvc metrics show` prints the headline side by side, which must fit 120 columns. MLflow has it in full.
DECIMALS = 4
# Columns of each curve's file, the first of which counts training; dvc.yaml plots them.
CURVES = {
    "sft": ("step", "loss"),
    "reward": ("step", "accuracy", "loss"),
    "referee": ("step", "accuracy", "loss"),
    "judge": ("step", "accuracy", "loss"),
    "critic": ("iteration", "explained_variance"),
    "ppo": ("iteration", "reward_mean", "kl", "length", "repetition"),
}


def headline_metrics(metrics: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Select the headline from the content of ``metrics/NAME.json`` by name, rounded.

    What is missing is left out: the synthetic world alone has a gold judge, and without pairs the
    checker is the only one.
    """
    flat = flatten(metrics)
    headline = {}
    for name, path in HEADLINE.items():
        value = flat.get(path)
        if isinstance(value, int | float) and math.isfinite(value):
            headline[name] = round(float(value), DECIMALS)
    return headline


def write_curves(histories: Mapping[str, Sequence[Mapping[str, Any]]], folder: Path) -> None:
    """Write ``NAME.csv`` for each history that has the columns of its curves; remove the others."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, columns in CURVES.items():
        rows = []
        for row in histories.get(name, ()):
            if set(columns) <= row.keys():
                rows.append([row[column] for column in columns])
        if rows:
            text = io.StringIO()
            csv.writer(text, lineterminator="\n").writerows([columns, *rows])
            atomic_write_text(folder / f"{name}.csv", text.getvalue())


def conclude(gates: Mapping[str, GateDecision], evaluation: Mapping[str, Any]) -> JsonObject:
    """Conclude from the gates' decisions and from ``metrics/evaluation.json``; either may be empty.

    Returns:
        The first lines of the report: ``state``, ``good``, ``bad`` or ``open``, which gives the
        colour; ``headline``, how the policy stands to SFT and what the gate decided; ``judges``, a
        sentence for each that decides; ``alarms``, figures to read before anything is released, the
        gravest first; ``release``, whether the policy may be registered; ``remedies``, what to do
        about the conditions that forbid it; ``next_step``.
    """
    judges = judge_results(evaluation.get("comparison", {}))
    state, release, next_step = _release(gates)
    if state == "good" and standing_of(judges) is not Standing.BETTER:
        state = "open"
    stopped = failed_gate(gates)
    decision = gates.get(stopped or "policy")
    if judges:
        headline = sentence_case(verdict_sentence(judges, "SFT", decision))
    elif stopped is not None:
        headline = f"No verdict: {describe_decision(gates[stopped])}"
    else:
        headline = "No verdict: no policy was compared with SFT"
    sentences = [_sentence(judge) for judge in judges] + checker_sentences(evaluation)
    alarming = [alarm.sentence for alarm in alarms(evaluation)]
    return {
        "state": state,
        "headline": headline,
        "judges": sentences,
        "alarms": alarming,
        "release": release,
        "remedies": [] if decision is None else remedies(decision),
        "next_step": next_step,
    }


def sentence_case(text: str) -> str:
    """Return ``text`` with a capital at its beginning."""
    return text[:1].upper() + text[1:]


MEANINGS = {
    GOLD: "the true preference of the synthetic world, which no training sees",
    JUDGE: "a reward model that had no part in training or selection",
    CHECKER: "the reward function of training on prompts that training has not seen",
}


def _sentence(result: JudgeResult) -> str:
    by = result.judge
    if by in MEANINGS:
        by = f"{by}, {MEANINGS[by]},"
    return (
        f"By {by} it wins {result.won} of {result.prompts} prompts about {result.clusters} different questions, "
        f"ties as half{result.at_equal_length}."
    )


def checker_sentences(evaluation: Mapping[str, Any]) -> list[str]:
    """Say what reward functions gave both models' replies; nothing where they do not judge."""
    compared = evaluation.get("comparison", {}).get(CHECKER)
    if compared is None:
        return []
    before, after = (format_number(evaluation[side][CHECKER]) for side in ("sft", "policy"))
    gain = format_number(compared["mean_difference"])
    low, high = (compared.get(f"mean_difference_{bound}95") for bound in ("low", "high"))
    return [
        f"The mean score by {CHECKER} is {after}, before training {before}: a gain of {gain} "
        f"(95 % interval {format_interval(low, high, 3)}, paired by prompt)."
    ]


def _release(gates: Mapping[str, GateDecision]) -> tuple[str, str, str]:
    """Return the state, whether the policy may be registered, and the next step."""
    failed = failed_gate(gates)
    if failed:
        return (
            "bad",
            f"Stopped at the {failed} gate. Nothing may be registered.",
            "change data or params.yaml as said above, and run again: rlhf run",
        )
    policy_gate = gates.get("policy")
    if policy_gate is None:
        return (
            "open",
            "Not finished: the policy gate has not been reached.",
            "rlhf run goes on where it ended",
        )
    if policy_gate.passed:
        return (
            "good",
            "The policy passed its gate: it may be registered and promoted.",
            "rlhf chat models/policy",
        )
    return (
        "open",
        "The policy did not pass its gate. Decisions are recorded, not enforced; what is registered is ungated.",
        "rlhf chat models/policy",
    )


# The report is written before registration. What it says of release until then stands between
# these comments.
BEGIN = "<!-- release -->"
END = "<!-- /release -->"
SHOWN_CONDITIONS = 6


@dataclass(frozen=True)
class ReleaseDecision:
    """Whether the policy of a report was released, at one moment.

    Attributes:
        state: ``good``, ``bad`` or ``open``, which gives the colour.
        headline: Such as ``Released: rlhf-policy version 3 is the champion``.
        registered: As which version, or that it was not.
        reason: Why it was promoted or not; empty where ``conditions`` say it.
        conditions: All conditions that do not hold.
        decided: Who decided and when; empty if nobody did.
        champion: Which version is champion; empty if that is not known or said already.
        next_command: What to type next.
        next_hint: What that command is for.
        as_of: When all this was true, in UTC.
        tries: How many policies the policy gate has judged; empty for the first.
    """

    state: str
    headline: str
    registered: str
    reason: str
    conditions: tuple[Criterion, ...]
    decided: str
    champion: str
    next_command: str
    next_hint: str
    as_of: str
    tries: str = ""

    @property
    def first_conditions(self) -> tuple[Criterion, ...]:
        """The conditions that the page lists."""
        return self.conditions[:SHOWN_CONDITIONS]
