"""What became of the policy of a workspace, and the page that shows it.

Gates, registry and history say it. DVC knows ``report.html``, which stays as its stage wrote it;
this copy is written anew after each decision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.registry.client import (
    CHAMPION,
    connect,
    has_record,
    read_aliases,
    registry_errors,
    tag_line,
    version_numbers,
    versions,
)
from flows.registry.decisions import REPORT_TAG, read_report, utc_now
from flows.registry.evidence import DATA_CARD, count_policy_decisions
from flows.registry.history import DECLINE, ReleaseState, utc_minute
from flows.registry.promote import (
    DECLINED_TAG,
    gate_conditions,
    promotion_obstacle,
)
from flows.registry.register import RegisteredHere, read_registered
from flows.workspace import PRIVATE, private_path
from rlhf_core.config.loading import load_section
from rlhf_core.config.operations import RegistryConfig
from rlhf_core.errors import DataError, RlhfError
from rlhf_core.evaluation.promotion import Criterion
from rlhf_core.evaluation.remedies import remedy_for
from rlhf_core.evaluation.report.headline import (
    BEGIN,
    ReleaseDecision,
    sentence_case,
)
from rlhf_core.gates import GATES, closed_gate, read_gate
from rlhf_core.storage.files import atomic_write_json, atomic_write_text, read_json, sha256_file
from rlhf_core.tracking.pipeline_run import RELEASE_PAGE, REPORT_PAGE

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion


POLICY_FOLDER = "models/policy"
GOOD, BAD, OPEN = "good", "bad", "open"
CHANGE = ("rlhf run", "after a change of data or params.yaml; what is up to date is not repeated")
CHAT = ("rlhf chat", "talk to the champion")
EXPLAIN = ("rlhf promote --dry-run --explain", "every criterion with its value and margin")
FORCE = ("rlhf promote --force --reason TEXT", "makes it champion without a match")
OWNER = ("rlhf registry terms", "who owns the registered policy, and what a promotion requires")


@dataclass(frozen=True)
class RunNotes:
    """What the run that wrote the report knew of its last steps beyond what the registry records.

    Attributes:
        registered: What was registered and what was refused, in one line; empty if nothing was
            tried.
        because: Why nothing was registered, or why nobody decided on what was.
        hint: What the next ``rlhf run`` is for, where the run did not reach its end.
        gate: The gate that ended the run; empty if none did.
    """

    registered: str = ""
    because: str = ""
    hint: str = ""
    gate: str = ""


def read_release_decision(workspace: Path, notes: RunNotes | None = None) -> ReleaseDecision:
    """Say what became of the policy of ``workspace``; nothing is changed.

    The page of the release shows it, ``rlhf status``, and the verdict of a run on the terminal, on
    Prefect and in MLflow.

    Args:
        notes: What the run that wrote the report said; None for what it said when the page was
            written last.
    """
    notes = notes or _kept_notes(workspace) or RunNotes()
    return replace(_release_decision(workspace, notes), tries=describe_tries(workspace))


def _release_decision(workspace: Path, notes: RunNotes) -> ReleaseDecision:
    here = _version_of_policy(workspace, notes)
    if here is None:
        return _not_registered(workspace, notes)
    state = ReleaseState.of(workspace, here.model)
    if here.version not in version_numbers(state.client, here.model):
        champion = _champion_sentence(here.model, state.champion)
        again = ("rlhf run", "registers the policy again")
        gone = _say(
            BAD,
            f"Not released: {_label(here)} was deleted",
            "It is no longer in the registry.",
            "",
            again,
        )
        return replace(gone, registered="No version holds this policy.", champion=champion)
    gates = "it passed its gates"
    if here.ungated:
        gates = f"no gate vouches for it: {here.ungated}"
    champion = ""
    if state.champion != here.version:
        champion = _champion_sentence(here.model, state.champion)
    decision = _standing(state, here, state.version(here.version), notes)
    registered = f"Registered as {_label(here)}; {gates}."
    return replace(decision, registered=registered, champion=champion)


# How often a policy that is no better than SFT passes a condition on the lower end of a 95 %
# interval.
CHANCE_OF_ONE = 0.025


def describe_tries(workspace: Path) -> str:
    """Say how many policies the gate has judged, and what that does to its conditions.

    The gate itself asks the same of the first try and of the tenth: a stricter bound for later ones
    would punish whoever mends a mistake and runs again. So the number is shown wherever the
    decision is. A promotion is stricter at each attempt (``registry.error_budget``).

    Returns:
        An empty text for the first policy, and where MLflow does not say.
    """
    try:
        judged, experiment = count_policy_decisions(workspace)
    except RlhfError:
        return ""
    if judged < 2:
        return ""
    chance = 1.0 - (1.0 - CHANCE_OF_ONE) ** judged
    return (
        f"the policy gate has judged {judged} policies in experiment {experiment}; if none of them were better than "
        f"SFT, one would still pass a win-rate condition by luck with a chance of up to {100 * chance:.0f} %"
    )


def release_sentences(decision: ReleaseDecision) -> str:
    """A decision in one line: what became of the policy, and why."""
    unmet = "; ".join(map(str, decision.conditions))
    return ". ".join(part for part in (decision.headline, decision.reason or unmet) if part)


def _say(
    state: str,
    headline: str,
    reason: str = "",
    decided: str = "",
    next_step: tuple[str, str] = CHANGE,
    conditions: tuple[Criterion, ...] = (),
) -> ReleaseDecision:
    """Return a decision made now, without the registered version and the champion."""
    as_of = utc_minute(utc_now())
    return ReleaseDecision(state, headline, "", reason, conditions, decided, "", *next_step, as_of)


def _label(here: RegisteredHere) -> str:
    return f"{here.model} version {here.version}"


def _version_of_policy(workspace: Path, notes: RunNotes) -> RegisteredHere | None:
    """Return the version that holds the policy of the report; None if it is not registered."""
    nothing = notes.because and not notes.registered
    return None if nothing or closed_gate(workspace) else read_registered(workspace, POLICY_FOLDER)


def _unmet_conditions(workspace: Path, gates: Sequence[str] = GATES) -> tuple[Criterion, ...]:
    """The conditions that do not hold in ``gates/NAME.json``, gate by gate."""
    unmet = []
    for name in gates:
        decision = read_gate(workspace, name)
        if decision is None:
            continue
        for row in decision.failed:
            remedy = str(remedy_for(decision, row))
            told = row.metric, row.measured, row.required
            unmet.append(Criterion(*told, passed=False, why=row.why, remedy=remedy))
    return tuple(unmet)


def _not_registered(workspace: Path, notes: RunNotes) -> ReleaseDecision:
    closed, because = closed_gate(workspace), "" if notes.registered else notes.because
    # A run that ended elsewhere leaves the file of a gate that an earlier run failed by.
    if closed is not None and (not because or notes.gate == closed.name):
        gate = closed.name
        hint = f"`rlhf gate {gate} --explain` has every condition"
        if gate == "policy":
            hint = f"`rlhf chat models/policy` talks to the policy that was stopped, {hint}"
        again = ("rlhf run", f"{notes.hint or CHANGE[1]}; {hint}")
        decided = "Decided by the gate's conditions in params.yaml"
        unmet = _unmet_conditions(workspace, (gate,))
        decision = _say(
            BAD, f"Not registered: the {gate} gate refuses it", "", decided, again, unmet
        )
    elif because or notes.registered:
        again = ("rlhf run", notes.hint or CHANGE[1])
        decision = _say(BAD, "Not registered", because or notes.registered, "", again)
    else:
        first = ("rlhf run", "registers it, once its gates pass")
        what = "No run has registered the policy in models/ yet."
        decision = _say(OPEN, "Not registered", what, "", first)
    champion = ""
    if has_record(workspace):
        name = load_section(workspace, "registry", RegistryConfig).policy
        try:
            number = read_aliases(connect(workspace), name).get(CHAMPION)
            champion = _champion_sentence(name, number)
        except RlhfError:  # which may be why nothing is registered
            if closed is None and not (because or notes.registered):
                raise  # the version may be in a registry that is not the one named now
    trained = (workspace / POLICY_FOLDER).is_dir()
    registered = "No version holds this policy." if trained else "No policy was trained."
    return replace(decision, registered=registered, champion=champion)


def _standing(
    state: ReleaseState, here: RegisteredHere, version: ModelVersion, notes: RunNotes
) -> ReleaseDecision:
    """What was decided on the version, the newest decision first."""
    label, number = _label(here), here.version
    crownings = state.crownings
    made = [index for index, (_, champion) in enumerate(crownings) if champion == number]
    if state.champion == number:
        entry = crownings[made[-1]][0] if made else None
        reason = f"@{CHAMPION} was moved by something else than rlhf."
        released, place, forced = "Released", "the champion", bool(here.ungated)
        if entry is not None:
            forced = forced or entry["decision"].get("forced") is not None
            verb = "Promoted"
            if entry["action"] == "rollback":
                verb, place = "Champion again", "the champion again"
            if entry["reason"]:
                reason = f"{verb}: {entry['reason']}"
        if forced:
            released = "Released by force"
        chat = CHAT
        if state.champions[1:]:
            chat = (CHAT[0], f"{CHAT[1]}; `rlhf rollback --reason TEXT` takes it back")
        headline = f"{released}: {label} is {place}"
        return _say(OPEN if forced else GOOD, headline, reason, _decided_by(entry), chat)
    request = state.request
    if request is not None and state.waiting == number:
        decided = f"Requested by {request.entry['who']}, {utc_minute(request.entry['time'])}"
        approve = (f"rlhf approve --version {number}", "or `rlhf decline --reason TEXT`")
        reason = f"It passed what a promotion requires: {request.entry['reason']}"
        return _say(OPEN, f"Not released yet: {label} waits for approval", reason, decided, approve)
    if DECLINED_TAG in version.tags:  # a version that becomes champion loses it
        declined = None
        for entry in state.entries:
            if (entry["action"], str(entry["decided_on"])) == (DECLINE, number):
                declined = entry
        headline = f"Not released: {label} was declined"
        return _say(BAD, headline, tag_line(version.tags, DECLINED_TAG), _decided_by(declined))
    if made and made[-1] + 1 < len(crownings):
        entry, since = crownings[made[-1] + 1]
        if entry["action"] == "rollback":
            headline = f"Taken back: {label} was rolled back to version {since}"
            return _say(BAD, headline, f"Rolled back: {entry['reason']}", _decided_by(entry))
        headline = f"No longer released: version {since} has replaced {label}"
        return _say(OPEN, headline, f"Replaced: {entry['reason']}", _decided_by(entry), CHAT)
    return _not_promoted(state, here, version, notes)


def _not_promoted(
    state: ReleaseState, here: RegisteredHere, version: ModelVersion, notes: RunNotes
) -> ReleaseDecision:
    """What stands against a version, else its last match, else that nobody has decided."""
    workspace, label = state.workspace, _label(here)
    headline = f"Not released: {label} was not promoted"
    not_allowed = state.not_the_owner
    if obstacle := promotion_obstacle(version, gate_conditions(workspace)):
        explain = (
            "rlhf gate policy --explain",
            "every condition; `rlhf promote --force --reason TEXT` overrides",
        )
        # Why no gate vouches for a version is said where it is named.
        said = bool(here.ungated) and here.ungated in obstacle
        reason = "" if said else f"{sentence_case(obstacle)}."
        unmet = _unmet_conditions(workspace) if here.ungated else ()
        return _say(OPEN, headline, reason, "", OWNER if not_allowed else explain, unmet)
    if removed := state.removed_champion:
        reason = f"{sentence_case(removed)}."
        return _say(OPEN, headline, reason, "", OWNER if not_allowed else FORCE)
    # The tag names the report of the last decision in this registry: the workspace may have others.
    decision, request = read_report(workspace, version.tags.get(REPORT_TAG, "")), state.request
    if decision.get("challenger") == here.version:
        # Criteria that do not hold, or a request that no longer stands.
        if decision.get("awaiting_approval") and request is not None:
            decided, again = _decided_by(request.followed_by), ("rlhf promote", "judges it again")
            return _say(OPEN, headline, f"{request.closed_because()}.", decided, again)
        against = f" in place of version {decision['champion']}" if decision.get("champion") else ""
        failed = []
        for row in decision.get("criteria") or ():
            if not row["passed"]:
                told = row["name"], row["measured"], row["required"]
                failed.append(Criterion(*told, passed=False))
        reason = "" if failed else f"Not promoted: {decision['reason']}"
        decided = _decided_by(decision)
        return _say(OPEN, f"{headline}{against}", reason, decided, EXPLAIN, tuple(failed))
    if "decision.reason" in version.tags:  # decided in another workspace
        return _say(OPEN, headline, tag_line(version.tags, "decision.reason"), "", EXPLAIN)
    if not_allowed:
        return _say(OPEN, headline, not_allowed, "", OWNER)
    decide = ("rlhf run", notes.hint) if notes.hint else ("rlhf promote", "decide on it")
    return _say(OPEN, f"Not released: nobody has decided on {label}", notes.because, "", decide)


def _champion_sentence(model: str, number: str | None) -> str:
    return (
        f"The champion of {model} is version {number}." if number else f"{model} has no champion."
    )


def _decided_by(entry: Mapping[str, Any] | None) -> str:
    if entry is None:
        return ""
    return f"Decided by {entry.get('who') or 'unknown'}, {utc_minute(str(entry['time']))}"


RECORD = "release.json"


def write_release_page(workspace: Path, notes: RunNotes | None = None) -> ReleaseDecision:
    """Write ``release.html`` by what is true now, and attach it to the version's run.

    There is no page where there is no report, or one without a place for it, or no run has come to
    a decision.

    Args:
        notes: What the run that wrote the report said; None for what it said when the page was
            written last.

    Raises:
        RlhfError: The registry does not answer. A page of the same report stays.
    """
    from rlhf_core.evaluation.report.view import with_release

    report, page = workspace / REPORT_PAGE, workspace / RELEASE_PAGE
    if current_page(workspace) is None:
        page.unlink(missing_ok=True)
    text = report.read_text(encoding="utf-8", errors="replace") if report.is_file() else ""
    digest = sha256_file(report) if text else ""
    notes = notes or _kept_notes(workspace) or RunNotes()
    decision = read_release_decision(workspace, notes)
    here = _version_of_policy(workspace, notes)
    if here is None and not (notes.because or notes.registered or closed_gate(workspace)):
        return decision  # no run has come to a decision yet
    rendered = with_release(text, decision) if BEGIN in text else None
    if rendered is None:
        return decision
    atomic_write_text(page, rendered)
    record = {"report_sha256": digest, "notes": asdict(notes)}
    atomic_write_json(private_path(workspace, RECORD), record)
    if here is None:
        return decision
    # The page lies beside the evidence of the version that it is about, which may be deleted.
    client = connect(workspace)
    for version in versions(client, here.model):
        if str(version.version) == here.version and version.run_id:
            with registry_errors(client, f"attach {page.name} to {_label(here)}"):
                client.log_artifact(version.run_id, str(page))
                card = workspace / DATA_CARD.with_name("card.html")  # to which it links
                if card.is_file():
                    client.log_artifact(version.run_id, str(card), str(DATA_CARD.parent))
    return decision


def current_page(workspace: Path) -> Path | None:
    """Return ``release.html`` if it was made of the report that is there now; None otherwise."""
    return None if _kept_notes(workspace) is None else workspace / RELEASE_PAGE


def _kept_notes(workspace: Path) -> RunNotes | None:
    """The notes that the page was last written with; None if there is no page of this report."""
    report = workspace / REPORT_PAGE
    if not report.is_file() or not (workspace / RELEASE_PAGE).is_file():
        return None
    try:
        record = read_json(workspace / PRIVATE / RECORD)
        if record["report_sha256"] != sha256_file(report):
            return None
        return RunNotes(**record["notes"])
    except (DataError, KeyError, TypeError):  # written by another release of the package
        return None


def try_release_page(
    workspace: Path, notes: RunNotes | None = None, *, write: bool = True
) -> tuple[ReleaseDecision, str]:
    """Write the page; return what it says, and why it could not be written, empty if it was.

    Args:
        write: False leaves the page as it is.
    """
    try:
        return (write_release_page if write else read_release_decision)(workspace, notes), ""
    except (RlhfError, OSError) as error:
        hint = ("rlhf status", "says what was released, once the registry answers")
        headline = "Not known to be released: the registry does not say"
        unknown = _say(OPEN, headline, str(error), "", hint)
        return unknown, f"{RELEASE_PAGE} was not brought up to date: {error}"
