"""The verdict of a run: whether the new policy is better, by which judges, and what became of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flows.registry.decisions import PromotionDecision
from flows.registry.release_page import RunNotes, current_page, release_sentences, try_release_page
from flows.stage import StageOutcome
from rlhf_core.errors import EXIT_GATE_FAILED, EXIT_TRAINING_PAUSED, EXIT_USER_ERROR
from rlhf_core.evaluation.remedies import remedies
from rlhf_core.evaluation.report.headline import ReleaseDecision
from rlhf_core.evaluation.report.note import (
    SFT,
    KlEstimate,
    judged_facts,
    markdown_text,
    note_of,
    verdict_note,
)
from rlhf_core.evaluation.verdict import (
    JudgeResult,
    Standing,
    alarms,
    describe_decision,
    failed_conditions,
    judge_results,
    standing_of,
    verdict_sentence,
)
from rlhf_core.gates import GateDecision, read_gate
from rlhf_core.storage.files import read_json, sha256_file
from rlhf_core.tracking.pipeline_run import RELEASE_PAGE, REPORT_PAGE

EVALUATE_STAGE = "evaluate"
POLICY_GATE_STAGE = "gate-policy"
REPORT_STAGE = "report"
POLICY_STAGE = "ppo"
EVALUATION = Path("metrics") / "evaluation.json"
TRAINING = Path("metrics") / f"{POLICY_STAGE}.json"  # by whose content a policy is known


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
        policy: SHA-256 of the policy's ``metrics/ppo.json``; empty if the run has made or found
            none.
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
    policy: str = ""

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
    facts += judged_facts(verdict.failed, verdict.judges, verdict.kl, verdict.alarms)
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
    trained = outcomes.get(POLICY_STAGE)
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
    alarming = tuple(alarm.sentence for alarm in alarms(evaluation))
    verdict = RunVerdict(
        standing=standing_of(judges),
        opponent=opponent,
        judges=judges,
        kl=KlEstimate.of(evaluation),
        failure=failure,
        registered=registration.registered,
        release=release,
        report=report,
        alarms=alarming,
        note=verdict_note(workspace, opponent) if judges else "",
        gate=gate,
        unmet=unmet,
        policy=policy_here(workspace) if trained is not None and trained.ok else "",
    )
    if not registration.registered:
        nothing = "nothing" if verdict.tells_failure else f"nothing: {because}"
        verdict = replace(verdict, registered=nothing)
    return verdict, problem if report else ""


def policy_here(workspace: Path) -> str:
    """Return what the policy in models/ is known by, see :class:`RunVerdict`; empty without one."""
    metrics = workspace / TRAINING
    return sha256_file(metrics) if metrics.is_file() else ""


def verdict_here(workspace: Path) -> str:
    """Say how the policy in models/ stands to SFT, by evaluation and gate as they are there.

    Empty where no evaluation is.
    """
    if not (workspace / EVALUATION).is_file():
        return ""
    judges = judge_results(read_json(workspace / EVALUATION).get("comparison", {}))
    gate = read_gate(workspace, "policy")
    if gate is not None and gate.changed_evidence(workspace):
        gate = None
    return verdict_sentence(judges, SFT, gate, in_full=False) if judges else ""


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


def verdict_markdown(verdict: RunVerdict, report_link: str | None = None) -> str:
    """Describe the verdict in Markdown, with the judges as a table.

    Args:
        report_link: An address at which a browser shows the report; without one its path is named.
    """
    (_, headline), *facts = verdict_facts(verdict)
    points = []
    if verdict.report:
        report = f"`{verdict.report}` in the workspace"
        if report_link:
            report = f"[{verdict.report}]({report_link})"
        points.append(f"- Report: {report}")
    release = verdict.release
    points.append(f"- Next: `{release.next_command}` ({markdown_text(release.next_hint)})")
    return note_of(headline, verdict.judges, facts, points)
