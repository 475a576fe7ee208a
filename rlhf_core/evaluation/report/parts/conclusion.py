"""What the report says first: is the policy better, by whom, may it be released, and what to do next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_core.evaluation.figures.format_number import format_number
from rlhf_core.evaluation.report.sources import JsonObject, failed_gate
from rlhf_core.evaluation.verdict.alarms import alarms
from rlhf_core.evaluation.verdict.standing import JudgeResult, Standing, judge_results, standing_of


@dataclass(frozen=True)
class Conclusion:
    """The first lines of the report.

    Attributes:
        state: ``good``, ``bad`` or ``open``, which gives the colour.
        headline: Such as ``Better than SFT``.
        judges: One sentence per judge that decides.
        alarms: Figures to read before anything is released, the gravest first.
        release: Whether the policy may be registered, and which conditions forbid it.
        next_step: What to do now.
    """

    state: str
    headline: str
    judges: tuple[str, ...]
    alarms: tuple[str, ...]
    release: str
    next_step: str


def conclude(gates: Mapping[str, JsonObject], evaluation: Mapping[str, Any]) -> Conclusion:
    """Conclude from the gates' evidence and ``metrics/evaluation.json``, either of which may be empty."""
    judges = judge_results(evaluation.get("comparison", {}))
    standing = standing_of(judges)
    state, release, next_step = _release(gates)
    if state == "good" and standing is not Standing.BETTER:
        state = "open"
    if standing is Standing.NOT_COMPARED:
        headline = "No verdict: the policy was not compared with SFT"
    else:
        headline = f"{standing.value.capitalize()} than SFT"
    alarming = tuple(alarm.sentence for alarm in alarms(evaluation))
    return Conclusion(state, headline, tuple(map(_sentence, judges)), alarming, release, next_step)


def _sentence(result: JudgeResult) -> str:
    low, high = (format_number(bound, 2) for bound in (result.low95, result.high95))
    at_equal_length = "" if result.lc_win_rate is None else f"; at equal length {format_number(result.lc_win_rate, 2)}"
    return (
        f"By {result.judge} it wins {format_number(result.win_rate, 2)} of {result.prompts} prompts, ties as half "
        f"(95 %: {low} to {high}){at_equal_length}."
    )


def _release(gates: Mapping[str, JsonObject]) -> tuple[str, str, str]:
    """State, whether the policy may be registered, and the next step."""
    failed = failed_gate(gates)
    if failed:
        conditions = [c["metric"] for c in gates[failed].get("conditions", []) if not c.get("passed")]
        return (
            "bad",
            f"Stopped at the {failed} gate: {', '.join(conditions)}. Nothing may be registered.",
            "Read the reasons of the conditions that fail below, change data or params.yaml, and run again: rlhf run",
        )
    policy_gate = gates.get("policy")
    if policy_gate is None:
        return "open", "Not finished: the policy gate has not been reached.", "rlhf run goes on where it ended"
    if policy_gate.get("passed"):
        return "good", "The policy passed its gate: it may be registered and promoted.", "rlhf chat models/policy"
    return (
        "open",
        "The policy did not pass its gate. Decisions are recorded, not enforced; what is registered is ungated.",
        "Read the reasons of the conditions that fail below",
    )
