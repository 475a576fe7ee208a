"""The verdict of a run: whether the new policy is better, by which judges, and what became of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flows.registry.decisions import PromotionDecision
from flows.registry.release_page import RunNotes, current_page, release_sentences, try_release_page
from flows.stage import StageOutcome
from rlhf_core.config.loading import load_params
from rlhf_core.config.profiles import profile_names
from rlhf_core.errors import EXIT_GATE_FAILED, EXIT_TRAINING_PAUSED, EXIT_USER_ERROR, RlhfError
from rlhf_core.evaluation.remedies import remedies
from rlhf_core.evaluation.report.headline import (
    MEANINGS,
    ReleaseDecision,
    sentence_case,
)
from rlhf_core.evaluation.verdict import (
    EVEN_WIN_RATE,
    JudgeResult,
    Standing,
    alarms,
    describe_decision,
    failed_conditions,
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
        judges: one result per judge that the policy was neither trained on nor selected by; empty
            if nothing was compared.
        failure: what ended the run, in one line; empty if nothing did.
        registered: what was registered and what was refused, in one line.
        release: what became of the policy, and what to do next.
        report: path of the report relative to the workspace, None if this run has none.
        alarms: figures of the evaluation to read before anything is released, the gravest first.
        note: that the profile is a toy, and what the words of the verdict are about; empty for
            other profiles.
        gate: The decision of the gate that ended the run, else of the policy gate; None if neither
            was reached.
        unmet: What a promotion required and does not hold, in words; empty if it was promoted or
            not tried.
    """

    standing: Standing
    opponent: str
    judges: tuple[JudgeResult, ...]
    kl: KlEstimate | None
    failure: str
    registered: str
    release: ReleaseDecision
    report: str | None
    alarms: tuple[str, ...] = ()
    note: str = ""
    gate: GateDecision | None = None
    unmet: tuple[str, ...] = ()

    @property
    def headline(self) -> str:
        """The verdict with the conditions that decided, or why there is none, in one sentence."""
        return self._sentence(in_full=True)

    @property
    def summary(self) -> str:
        """The same with how many conditions failed, for where ``failed`` follows it."""
        return self._sentence(in_full=False)

    @property
    def failed(self) -> list[str]:
        """The conditions of the gate that failed, each with what was found."""
        return [] if self.gate is None else failed_conditions(self.gate)

    def _sentence(self, *, in_full: bool) -> str:
        if self.judges:
            gate = self.gate if self.opponent == SFT else None
            return verdict_sentence(self.judges, self.opponent, gate, self.unmet, in_full=in_full)
        if self.gate is not None and self.tells_failure and not in_full:
            return f"no verdict: {self.gate.describe()}"
        if self.failure:
            return f"no verdict: {self.failure}"
        if self.opponent:
            return f"no verdict: a win rate against {self.opponent} is no number"
        return "no verdict: this pipeline has no evaluation"

    @property
    def tells_failure(self) -> bool:
        """Whether the headline says what ended the run."""
        is_closed = self.gate is not None and not self.gate.opens
        return bool(self.failure) and (is_closed or not self.judges)

    @property
    def promotion(self) -> str:
        """Whether the policy was promoted, and why unless the headline says so, in one line."""
        return self.release.headline if self.tells_failure else release_sentences(self.release)


def verdict_facts(verdict: RunVerdict, told: str = "") -> list[tuple[str, str]]:
    """Return the verdict as pairs of label and text, which terminal and Markdown both show.

    Args:
        told: What to say in place of why there is no verdict, where that has been told in full.
    """
    summary = f"no verdict: {told}" if told and not verdict.judges else verdict.summary
    facts = [("verdict", summary)]
    facts += [("failed", condition) for condition in verdict.failed]
    for judge in verdict.judges:
        counted = f"{judge.prompts} prompts about {judge.clusters} questions"
        text = f"{judge.judge}: win rate {judge.won}, {counted}{judge.at_equal_length}"
        facts.append(("judges", text))
    for judge in verdict.judges:
        if judge.judge in MEANINGS:
            facts.append(("", f"{judge.judge} is {MEANINGS[judge.judge]}"))
    if (kl := verdict.kl) is not None:
        interval = f"95 % interval {kl.low95:.2f} to {kl.high95:.2f}"
        facts.append(("KL", f"{kl.mean:.2f} nats per reply from SFT, {interval}"))
    facts += [("alarms", alarm) for alarm in verdict.alarms]
    facts += [("registered", verdict.registered), ("promotion", verdict.promotion)]
    facts += [("tries", verdict.release.tries), ("note", verdict.note)]
    if verdict.gate is not None:
        facts += [("to do", remedy) for remedy in remedies(verdict.gate)]
    return [(label, text) for label, text in facts if text]


def reach_verdict(
    workspace: Path,
    outcomes: Mapping[str, StageOutcome],
    registration: RegistrationResult,
    *,
    page: bool = True,
) -> tuple[RunVerdict, str]:
    """Read the verdict of a run from its evaluation, gates and match, and from the registry.

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
    evaluation: Mapping[str, Any] = {}
    if evaluate is not None and evaluate.ok and (workspace / EVALUATION).is_file():
        evaluation = read_json(workspace / EVALUATION)
    decision = registration.decision
    judges: tuple[JudgeResult, ...] = ()
    unmet: tuple[str, ...] = ()
    opponent = ""
    if decision is not None and decision.match:
        judges = judge_results(decision.match["comparison"])
        opponent, unmet = f"champion version {decision.champion}", _unmet_criteria(decision)
    elif "comparison" in evaluation:
        judges, opponent = judge_results(evaluation["comparison"]), SFT
    because = registration.error or registration.undecided_because
    if not registration.registered:
        because = failure or registration.error or "the run was stopped"
    hint = _hint(failed, registration)
    notes = RunNotes(registration.registered, because, hint, closed.name if closed else "")
    release, problem = try_release_page(workspace, notes, write=page)
    report = None
    if reported is not None and reported.ok and (workspace / REPORT_PAGE).is_file():
        is_current = page and not problem and current_page(workspace) is not None
        report = RELEASE_PAGE if is_current else REPORT_PAGE
    gate, decided = closed, outcomes.get(POLICY_GATE_STAGE)
    if gate is None and decided is not None and decided.ok:
        gate = read_gate(workspace, "policy")
    # A figure that is not finite was written as null.
    kl = [evaluation[key] for key in KL_KEYS if evaluation.get(key) is not None]
    estimate = KlEstimate(*kl) if len(kl) == len(KL_KEYS) else None
    alarming = tuple(alarm.sentence for alarm in alarms(evaluation))
    verdict = RunVerdict(
        standing=standing_of(judges),
        opponent=opponent,
        judges=judges,
        kl=estimate,
        failure=failure,
        registered=registration.registered,
        release=release,
        report=report,
        alarms=alarming,
        note=toy_note(workspace, opponent) if judges else "",
        gate=gate,
        unmet=unmet,
    )
    if not registration.registered:
        nothing = "nothing" if verdict.tells_failure else f"nothing: {because}"
        verdict = replace(verdict, registered=nothing)
    return verdict, problem if report else ""


def _unmet_criteria(decision: PromotionDecision) -> tuple[str, ...]:
    """What the promotion required and does not hold, in one clause; win rates are told anyway."""
    if decision.promoted:
        return ()
    unmet = [str(of) for of in decision.criteria if not (of.passed or of.judge)]
    return (f"not promoted: {', and '.join(unmet)}",) if unmet else ()


def gate_that_stopped(workspace: Path, failed: StageOutcome | None) -> GateDecision | None:
    """Return the decision of the gate that ended a run; None if another failure did, or none."""
    if failed is None or failed.exit_code != EXIT_GATE_FAILED:
        return None
    # The data gate is part of the stage that reads the data.
    name = "data" if failed.stage == "validate" else failed.stage.removeprefix("gate-")
    decision = read_gate(workspace, name)
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
    if failed is None and registration.error:
        return "tries the registration again; the stages are up to date"
    if failed is None:
        return ""
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


def verdict_markdown(verdict: RunVerdict, report_link: str | None = None) -> str:
    """Describe the verdict in Markdown, with the judges as a table.

    Args:
        report_link: An address at which a browser shows the report; without one its path is named.
    """
    (_, headline), *facts = verdict_facts(verdict)
    blocks = [f"**{markdown_text(sentence_case(headline))}**"]
    if verdict.judges:
        blocks.append(judges_table(verdict.judges))
    points = []
    for label, text in facts:
        if label == "judges":  # the table has them
            continue
        point = markdown_text(text)
        if label:
            point = f"{MARKDOWN_LABELS.get(label, f'{label.capitalize()}:')} {point}"
        points.append(f"- {point}")
    if verdict.report:
        report = f"`{verdict.report}` in the workspace"
        if report_link:
            report = f"[{verdict.report}]({report_link})"
        points.append(f"- Report: {report}")
    release = verdict.release
    points.append(f"- Next: `{release.next_command}` ({markdown_text(release.next_hint)})")
    return "\n\n".join([*blocks, "\n".join(points)])
