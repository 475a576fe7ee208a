"""The verdict of a run: is the new policy better, by which judges, and was it registered and
promoted?
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flows.registry.decisions import PromotionDecision
from flows.registry.release_page import RunNotes, current_page, release_sentences, try_release_page
from flows.stage import StageOutcome
from rlhf_core.config.loading import load_params
from rlhf_core.config.profiles import profile_names
from rlhf_core.errors import EXIT_GATE_FAILED, EXIT_TRAINING_PAUSED, EXIT_USER_ERROR, RlhfError
from rlhf_core.evaluation.report.headline import MEANINGS, remedies, sentence_case
from rlhf_core.evaluation.verdict import (
    EVEN_WIN_RATE,
    JudgeResult,
    Standing,
    alarms,
    describe_decision,
    judge_results,
    percent,
    standing_of,
    verdict_sentence,
)
from rlhf_core.gates import GateDecision, read_gate
from rlhf_core.storage.files import read_json
from rlhf_core.tracking.pipeline_run import RELEASE_PAGE, REPORT_PAGE

EVALUATE_STAGE = "evaluate"
POLICY_GATE_STAGE = "gate-policy"
REPORT_STAGE = "report"
SFT = "SFT"
EVALUATION = Path("metrics") / "evaluation.json"
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


@dataclass(frozen=True)
class RegistrationResult:
    """What the last steps of a run did; all fields are empty if the run did not reach them.

    Attributes:
        registered: one line on what was registered and what was refused.
        decision: the promotion decision, None if none was made.
        undecided_because: why no decision was made although there is a challenger.
        error: the message of an exception in registration or promotion.
    """

    registered: str = ""
    decision: PromotionDecision | None = None
    undecided_because: str = ""
    error: str = ""


@dataclass(frozen=True)
class RunVerdict:
    """The outcome of a pipeline run for the person who started it.

    Attributes:
        opponent: ``SFT`` or ``champion version N``; empty if nothing was compared.
        gate: The decision of the gate that ended the run, else of the policy gate; None if neither
            was reached.
        unmet: What a promotion required and does not hold, in words; empty if it was promoted or
            not tried.
        judges: one result per judge that the policy was neither trained on nor selected by; empty
            if nothing was compared.
        failure: what ended the run, or why nothing was compared, in one line; empty if nothing did.
        tries: how many policies the policy gate has judged; empty for the first.
        alarms: figures of the evaluation to read before anything is released, the gravest first.
        note: that the profile is a toy, and what the words of the verdict are about; empty for
            other profiles.
        registered: what was registered and what was refused, in one line.
        promotion: whether the policy was promoted and why, in one line.
        report: path of the report relative to the workspace, None if this run has none.
        next_command: the command to type next; without ``--workspace``, which depends on the
            current folder.
        next_hint: what that command is for, in a few words.
    """

    standing: Standing
    opponent: str
    judges: tuple[JudgeResult, ...]
    kl: KlEstimate | None
    failure: str
    registered: str
    promotion: str
    report: str | None
    next_command: str
    next_hint: str
    alarms: tuple[str, ...] = ()
    note: str = ""
    gate: GateDecision | None = None
    unmet: tuple[str, ...] = ()
    tries: str = ""

    @property
    def remedies(self) -> list[str]:
        """What to do about each condition that the gate failed by, a line each."""
        return [] if self.gate is None else remedies(self.gate)

    @property
    def meanings(self) -> list[str]:
        """A sentence on each judge whose name does not tell what it is."""
        return [
            f"{of.judge} is {MEANINGS[of.judge].strip(', ')}"
            for of in self.judges
            if of.judge in MEANINGS
        ]

    @property
    def headline(self) -> str:
        """The verdict in one sentence with the conditions that decided, or why there is no
        verdict.
        """
        if self.judges:
            return verdict_sentence(
                self.judges, self.opponent, self.gate if self.opponent == SFT else None, self.unmet
            )
        return f"no verdict: {self.failure}"


def reach_verdict(
    workspace: Path,
    outcomes: Mapping[str, StageOutcome],
    registration: RegistrationResult,
    *,
    page: bool = True,
) -> tuple[RunVerdict, str]:
    """Read the verdict of a run from its stored evaluation, gates and match, and what was released
    from the registry.

    The opponent is the champion if the promotion played a match against it, else SFT.

    Args:
        outcomes: how each stage ended, by name. Evaluation and report of an earlier run do not
            count.
        registration: what the last steps of the run did.
        page: write ``release.html``, which is then the report that the verdict names.

    Returns:
        The verdict, and why the page could not be written; empty if it was, or the run has no
        report.
    """
    failed = next((o for o in outcomes.values() if o.action in ("failed", "stopped")), None)
    closed = gate_that_stopped(workspace, failed)
    failure = describe_failure(workspace, failed) if failed else ""
    evaluate, reported = outcomes.get(EVALUATE_STAGE), outcomes.get(REPORT_STAGE)
    evaluated = evaluate is not None and evaluate.ok and (workspace / EVALUATION).is_file()
    evaluation = read_json(workspace / EVALUATION) if evaluated else {}
    decision = registration.decision
    judges: tuple[JudgeResult, ...] = ()
    unmet: tuple[str, ...] = ()
    opponent = ""
    if decision is not None and decision.match:
        judges = judge_results(decision.match["comparison"])
        opponent, unmet = f"champion version {decision.champion}", _unmet_criteria(decision)
    elif "comparison" in evaluation:
        judges, opponent = judge_results(evaluation["comparison"]), SFT
    uncompared = (
        f"a win rate against {opponent} is no number"
        if opponent
        else "this pipeline has no evaluation"
    )
    because = registration.error or registration.undecided_because
    if not registration.registered:
        because = failure or registration.error or "the run was stopped"
    kl = [
        evaluation[key] for key in KL_KEYS if evaluation.get(key) is not None
    ]  # null is what was not finite
    notes = RunNotes(
        registration.registered, because, _hint(failed, registration), closed.name if closed else ""
    )
    release, problem = try_release_page(workspace, notes, write=page)
    report = (
        REPORT_PAGE
        if reported is not None and reported.ok and (workspace / REPORT_PAGE).is_file()
        else None
    )
    told = bool(failure) and (closed is not None or not judges)  # by the headline
    verdict = RunVerdict(
        standing=standing_of(judges),
        opponent=opponent,
        judges=judges,
        kl=KlEstimate(*kl) if len(kl) == len(KL_KEYS) else None,
        failure=failure or ("" if judges else uncompared),
        registered=registration.registered or ("nothing" if told else f"nothing: {because}"),
        promotion=release.headline if told else release_sentences(release),
        report=RELEASE_PAGE
        if report and page and not problem and current_page(workspace)
        else report,
        next_command=release.next_command,
        next_hint=release.next_hint,
        alarms=tuple(alarm.sentence for alarm in alarms(evaluation)),
        note=toy_note(workspace, opponent) if judges else "",
        gate=closed or _decided_gate(workspace, outcomes),
        unmet=unmet,
        tries=release.tries,
    )
    return verdict, problem if report else ""


def _unmet_criteria(decision: PromotionDecision) -> tuple[str, ...]:
    """What the promotion required and does not hold, in one clause; the win rates themselves are
    told anyway.
    """
    unmet = [
        str(criterion)
        for criterion in decision.criteria
        if not (criterion.passed or criterion.is_plain_win_rate)
    ]
    return (f"not promoted: {', and '.join(unmet)}",) if unmet and not decision.promoted else ()


def _decided_gate(workspace: Path, outcomes: Mapping[str, StageOutcome]) -> GateDecision | None:
    """The decision of the policy gate where this run made it or found it up to date."""
    outcome = outcomes.get(POLICY_GATE_STAGE)
    return read_gate(workspace, "policy") if outcome is not None and outcome.ok else None


def gate_that_stopped(workspace: Path, failed: StageOutcome | None) -> GateDecision | None:
    """Return the decision of the gate that ended a run; None if another failure did, or none."""
    if failed is None or failed.exit_code != EXIT_GATE_FAILED:
        return None
    # The data gate is part of the stage that reads the data.
    decision = read_gate(
        workspace, "data" if failed.stage == "validate" else failed.stage.removeprefix("gate-")
    )
    return None if decision is None or decision.opens else decision


def toy_note(workspace: Path, opponent: str) -> str:
    """Say of a workspace of one of :data:`TOYS` what its verdict is worth; empty for any other."""
    names: list[str] = []
    with suppress(RlhfError):  # params.yaml may have been edited since the run began
        names = profile_names(load_params(workspace).profile)
    toy = next((name for name in names if name in TOYS), None)
    return "" if toy is None else TOY.format(toy=toy, opponent=opponent)


def describe_failure(workspace: Path, failed: StageOutcome) -> str:
    """Say in one line which stage ended the run and why; of a gate, which conditions failed."""
    if failed.action == "stopped":
        return f"stopped during {failed.stage}"
    gate = gate_that_stopped(workspace, failed)
    if gate is not None:
        return describe_decision(gate)
    return f"{failed.stage} failed: {failure_reason(workspace, failed)}"


def failure_reason(workspace: Path, failed: StageOutcome) -> str:
    """Say in one line why a stage failed; of a gate, which conditions do not hold."""
    gate = gate_that_stopped(workspace, failed)
    return failed.message.strip().partition("\n")[0] if gate is None else gate.reasons()


def _hint(failed: StageOutcome | None, registration: RegistrationResult) -> str:
    """What the next `rlhf run` is for, where this one did not reach its end."""
    if failed is None:
        return (
            "tries the registration again; the stages are up to date" if registration.error else ""
        )
    if failed.action == "stopped":
        return "resumes from here"
    hints = {
        EXIT_GATE_FAILED: "after a change of data or params.yaml; what is up to date is not repeated",
        EXIT_TRAINING_PAUSED: f"after a change of the settings of {failed.stage}; the report shows why it paused",
        EXIT_USER_ERROR: "once that is corrected; what is up to date is not repeated",
    }
    return hints.get(failed.exit_code, "resumes from the last checkpoint")


SPECIAL = re.compile(r"([\\`*|\[\]])")
REPLACED = {">=": "≥", "<=": "≤", "<": "&lt;", ">": "&gt;"}


def markdown_text(text: str) -> str:
    """Return ``text`` on one line so that Markdown shows it as it is, with ≥ and ≤ for >= and
    <=.
    """
    escaped = SPECIAL.sub(r"\\\1", " ".join(text.split()))
    for characters, replacement in REPLACED.items():
        escaped = escaped.replace(characters, replacement)
    return escaped


JUDGE_COLUMNS = ("judge", "win rate", "95 % interval", "at equal length", "prompts", "questions")


def judge_cells(judge: JudgeResult) -> tuple[object, ...]:
    """The row of a judge in a table of :data:`JUDGE_COLUMNS`."""
    rate, low, high = (
        f"{percent(share, EVEN_WIN_RATE)} %"
        for share in (judge.win_rate, judge.low95, judge.high95)
    )
    at_equal_length = (
        "" if judge.lc_win_rate is None else f"{percent(judge.lc_win_rate, EVEN_WIN_RATE)} %"
    )
    return (
        markdown_text(judge.judge),
        rate,
        f"{low} to {high}",
        at_equal_length,
        judge.prompts,
        judge.clusters,
    )


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown, whose cells are Markdown."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])


def verdict_markdown(verdict: RunVerdict, report_link: str | None = None) -> str:
    """Describe the verdict with its key numbers.

    Args:
        report_link: An address at which a browser shows the report; without one its path is named.
    """
    lines = [f"**{markdown_text(sentence_case(verdict.headline))}**", ""]
    lines += [f"- To do: {markdown_text(remedy)}" for remedy in verdict.remedies]
    if verdict.remedies:
        lines.append("")
    if verdict.judges:
        lines += [markdown_table(JUDGE_COLUMNS, map(judge_cells, verdict.judges)), ""]
    lines += [f"{markdown_text(meaning)}.\n" for meaning in verdict.meanings]
    if verdict.kl is not None:
        kl = verdict.kl
        lines += [
            f"KL from SFT: {kl.mean:.2f} nats per reply (95 %: {kl.low95:.2f} to {kl.high95:.2f})",
            "",
        ]
    if verdict.alarms:
        lines.append(f"- **Read before release:** {markdown_text('; '.join(verdict.alarms))}")
    lines.append(f"- Registered: {markdown_text(verdict.registered)}")
    lines.append(f"- Promotion: {markdown_text(verdict.promotion)}")
    if verdict.tries:
        lines.append(f"- Tries: {markdown_text(verdict.tries)}")
    if verdict.note:
        lines.append(f"- Note: {markdown_text(verdict.note)}")
    if verdict.report:
        report = (
            f"[{verdict.report}]({report_link})"
            if report_link
            else f"`{verdict.report}` in the workspace"
        )
        lines.append(f"- Report: {report}")
    lines.append(f"- Next: `{verdict.next_command}` ({markdown_text(verdict.next_hint)})")
    return "\n".join(lines)
