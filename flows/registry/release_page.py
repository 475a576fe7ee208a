"""What became of the policy of a workspace, by its gates, the registry and the history, and the page that shows it.

DVC knows ``report.html``, which stays as its stage wrote it; this copy is written anew after each decision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.registry.aliases import CHAMPION, aliases_of, get_version, registered_model, registry_errors, versions
from flows.registry.champion_change import DECLINED_TAG, promotion_obstacle
from flows.registry.client import RELEASE_PAGE, REPORT_PAGE, connect, has_record
from flows.registry.decisions import read_decisions, unfinished, utc_now
from flows.registry.evidence import GATES, REPORT_MODE, gate_conditions
from flows.registry.history import DECLINE, ApprovalRequest, latest_request, read_history, utc_minute
from flows.registry.session import not_the_owner
from flows.registry.workspace import RegisteredHere, read_registered
from flows.stage.outcome import SIGNS, condition_rows
from flows.workspace.folder import PRIVATE, private_path
from rlhf_core.config.loading import load_section
from rlhf_core.config.operations import RegistryConfig
from rlhf_core.errors import DataError, RlhfError
from rlhf_core.evaluation.report.headline import BEGIN, ReleaseDecision, UnmetCondition
from rlhf_core.storage.files import atomic_write_json, atomic_write_text, read_json, sha256_file

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion, RegisteredModel


POLICY_FOLDER = "models/policy"
GOOD, BAD, OPEN = "good", "bad", "open"
CHANGE = ("rlhf run", "after a change of data or params.yaml; what is up to date is not repeated")
EXPLAIN = ("rlhf promote --dry-run --explain", "every criterion with its value and margin")
OWNER = ("rlhf terms", "who owns the registered policy, and what a promotion requires")
Record = Mapping[str, Any]


@dataclass(frozen=True)
class RunNotes:
    """What the run that wrote the report said of its last steps; a registry does not know all of it.

    Attributes:
        nothing_because: Why nothing was registered; empty if something was.
        registered: What was registered and what was refused, in one line.
        promotion: Whether the policy was promoted and why, in one line.
    """

    nothing_because: str = ""
    registered: str = ""
    promotion: str = ""


@dataclass(frozen=True)
class _Standing:
    """How a registered version stands; ``decided`` is who did what and when."""

    state: str
    headline: str
    reason: str
    decided: str
    next_step: tuple[str, str]
    conditions: tuple[UnmetCondition, ...] = ()


@dataclass(frozen=True)
class ReleaseState:
    """What was registered, judged, decided and promoted of a policy, by one reading of its registry.

    The page of the release and ``rlhf status`` show it.

    Attributes:
        policy: Name of the registered policy.
        model: None where the registry does not know it.
        versions: Newest first.
        records: Its history, oldest entry first.
        decisions: The reports of promotions and rollbacks that the workspace holds, oldest first.
    """

    workspace: Path
    policy: str
    model: RegisteredModel | None
    versions: Sequence[ModelVersion]
    records: Sequence[Record]
    decisions: Sequence[Record]

    @property
    def aliases(self) -> Mapping[str, str]:
        """Version numbers by alias."""
        return aliases_of(self.model)

    @property
    def champion(self) -> str | None:
        """The version that is champion now."""
        return self.aliases.get(CHAMPION)

    @property
    def waiting(self) -> ApprovalRequest | None:
        """The request for approval that can still be decided."""
        request = latest_request(self.policy, self.records)
        return request if request is not None and request.is_open else None

    @property
    def interrupted(self) -> str:
        """The action that was begun and not completed, empty if none was."""
        left = unfinished(self.model, self.records)
        return str(left[-1]["action"]) if left else ""

    def version(self, number: str | None) -> ModelVersion | None:
        """The version with this number, None if there is none."""
        return next((version for version in self.versions if str(version.version) == number), None)


def read_release_state(client: MlflowClient, workspace: Path, policy: str) -> ReleaseState:
    """Read what the registry and ``workspace`` know of the registered model ``policy``.

    Raises:
        RlhfError: The registry does not answer, or the history cannot be read.
    """
    model = registered_model(client, policy)
    known = model is not None
    return ReleaseState(
        workspace,
        policy,
        model,
        versions(client, policy) if known else (),
        read_history(client, policy, model) if known else (),
        [decision for decision in read_decisions(workspace) if decision.get("model") == policy],
    )


@dataclass(frozen=True)
class _Registered:
    """The version that holds the policy of the workspace, and what is known of it."""

    here: RegisteredHere
    version: ModelVersion
    state: ReleaseState

    @property
    def label(self) -> str:
        """Such as ``rlhf-policy version 3``."""
        return f"{self.here.model} version {self.here.version}"


def read_release_decision(workspace: Path, notes: RunNotes) -> ReleaseDecision:
    """Say what became of the policy of ``workspace``; nothing is changed.

    Args:
        notes: What the run that wrote the report said.

    Raises:
        RlhfError: The registry does not answer, or the history cannot be read.
    """
    here = version_of_policy(workspace, notes)
    if here is None:
        return _not_registered(workspace, refused_by(workspace), notes)
    client = connect(workspace)
    state = read_release_state(client, workspace, here.model)
    version = state.version(here.version) or get_version(client, here.model, here.version)
    registered = _Registered(here, version, state)
    standing = _standing(workspace, registered, notes)
    gates = f"; no gate vouches for it: {here.ungated}" if here.ungated else "; it passed its gates"
    is_champion = registered.state.champion == here.version
    command, hint = standing.next_step
    return ReleaseDecision(
        state=standing.state,
        headline=standing.headline,
        registered=f"Registered as {registered.label}{gates}.",
        reason=standing.reason,
        conditions=standing.conditions,
        decided=standing.decided,
        champion="" if is_champion else _champion_sentence(here.model, registered.state.champion),
        next_command=command,
        next_hint=hint,
        as_of=utc_minute(utc_now()),
    )


def version_of_policy(workspace: Path, notes: RunNotes) -> RegisteredHere | None:
    """The version that was made of the policy that the report is about; None if there is none."""
    if notes.nothing_because or refused_by(workspace):
        return None
    return read_registered(workspace, POLICY_FOLDER)


def refused_by(workspace: Path) -> str:
    """The first gate that is enforced and did not pass; empty if there is none."""
    for gate in GATES:
        path = workspace / "gates" / f"{gate}.json"
        report = read_json(path) if path.is_file() else {"passed": True}
        if report.get("passed") is not True and report.get("mode") != REPORT_MODE:
            return gate
    return ""


def unmet_conditions(workspace: Path, gates: Sequence[str] = GATES) -> tuple[UnmetCondition, ...]:
    """The conditions that do not hold in ``gates/NAME.json``, gate by gate."""
    paths = [workspace / "gates" / f"{gate}.json" for gate in gates]
    return tuple(
        UnmetCondition(row.metric, row.value, row.bound, row.why)
        for path in paths
        if path.is_file()
        for row in condition_rows(read_json(path))
        if not row.passed
    )


def _not_registered(workspace: Path, gate: str, notes: RunNotes) -> ReleaseDecision:
    because = notes.nothing_because
    # A run that ended elsewhere leaves the file of a gate that an earlier run failed by.
    by_gate = bool(gate) and (not because or because.startswith(f"gate-{gate} "))
    headline = f"Not registered: the {gate} gate refuses it" if by_gate else "Not registered"
    untried = not (by_gate or because or notes.registered)
    command, hint = ("rlhf run", "registers it, once its gates pass") if untried else CHANGE
    if by_gate:
        hint = f"{hint}; `rlhf gate {gate} --explain` has every condition"
    return ReleaseDecision(
        state=OPEN if untried else BAD,
        headline=headline,
        registered="No version holds this policy.",
        reason="" if by_gate else because or notes.registered or "No run has registered it yet.",
        conditions=unmet_conditions(workspace, (gate,)) if by_gate else (),
        decided="Decided by the gate's conditions in params.yaml" if by_gate else "",
        champion=_present_champion(workspace),
        next_command=command,
        next_hint=hint,
        as_of=utc_minute(utc_now()),
    )


def _standing(workspace: Path, registered: _Registered, notes: RunNotes) -> _Standing:
    """What was decided on the version, the newest decision first."""
    moves = [record for record in registered.state.records if _new_champion(record, registered.here.model) is not None]
    made = [i for i, move in enumerate(moves) if _new_champion(move, registered.here.model) == registered.here.version]
    if registered.state.champion == registered.here.version:
        return _champion(registered, moves[made[-1]] if made else None)
    request = registered.state.waiting
    if request is not None and request.challenger == registered.here.version:
        return _Standing(
            OPEN,
            f"Not released yet: {registered.label} waits for approval",
            f"It passed what a promotion requires: {request.decision['reason']}",
            f"Requested by {request.asked_by}, {utc_minute(request.asked_at)}",
            (f"rlhf approve --version {request.challenger}", "or `rlhf decline --reason TEXT`"),
        )
    if DECLINED_TAG in registered.version.tags:  # a version that becomes champion loses it
        return _declined(registered)
    if made and made[-1] + 1 < len(moves):
        return _former_champion(registered, moves[made[-1] + 1])
    return _not_promoted(workspace, registered, notes)


def _champion(registered: _Registered, record: Record | None) -> _Standing:
    reason = "" if record is None else str(record["reason"])
    forced = reason.startswith("forced:") or bool(registered.here.ungated)
    again = record is not None and record["action"] == "rollback"
    verb = "Champion again" if again else "Promoted"
    return _Standing(
        OPEN if forced else GOOD,
        f"Released{' by force' if forced else ''}: {registered.label} is the champion{' again' if again else ''}",
        f"{verb}: {reason}" if reason else f"@{CHAMPION} was moved by something else than rlhf.",
        _decided_by(record),
        ("rlhf chat", "talk to the champion; `rlhf rollback --reason TEXT` takes it back"),
    )


def _former_champion(registered: _Registered, record: Record) -> _Standing:
    since = _new_champion(record, registered.here.model)
    if record["action"] == "rollback":
        headline = f"Taken back: {registered.label} was rolled back to version {since}"
        return _Standing(BAD, headline, f"Rolled back: {record['reason']}", _decided_by(record), CHANGE)
    headline = f"No longer released: version {since} has replaced {registered.label}"
    talk = ("rlhf chat", "talk to the champion")
    return _Standing(OPEN, headline, f"Replaced: {record['reason']}", _decided_by(record), talk)


def _declined(registered: _Registered) -> _Standing:
    number = registered.here.version
    records = [r for r in registered.state.records if r["action"] == DECLINE and str(r["decided_on"]) == number]
    reason = str(registered.version.tags[DECLINED_TAG])
    decided = _decided_by(records[-1] if records else None)
    return _Standing(BAD, f"Not released: {registered.label} was declined", reason, decided, CHANGE)


def _not_promoted(workspace: Path, registered: _Registered, notes: RunNotes) -> _Standing:
    """An obstacle by what is recorded of the version, else the last match, else that nobody has decided."""
    headline = f"Not released: {registered.label} was not promoted"
    not_allowed = not_the_owner(registered.here.model, registered.state.model, workspace)
    if obstacle := promotion_obstacle(registered.version, gate_conditions(workspace)):
        unmet = unmet_conditions(workspace) if registered.here.ungated else ()
        explain = ("rlhf gate policy --explain", "every condition; `rlhf promote --force --reason TEXT` overrides")
        if not_allowed:
            explain = OWNER
        # Why no gate vouches for a version is said where it is named.
        said = bool(registered.here.ungated) and registered.here.ungated in obstacle
        reason = "" if said else f"{obstacle[0].upper()}{obstacle[1:]}."
        return _Standing(OPEN, headline, reason, "", explain, unmet)
    for decision in reversed(registered.state.decisions):
        if decision.get("challenger") == registered.here.version:
            return _refused(registered, headline, decision)
    if "decision.reason" in registered.version.tags:  # decided in another workspace
        return _Standing(OPEN, headline, registered.version.tags["decision.reason"], "", EXPLAIN)
    if not_allowed:
        return _Standing(OPEN, headline, not_allowed, "", OWNER)
    headline = f"Not released: nobody has decided on {registered.label}"
    return _Standing(OPEN, headline, notes.promotion, "", ("rlhf promote", "decide on it"))


def _refused(registered: _Registered, headline: str, decision: Record) -> _Standing:
    """By the last decision of this workspace: criteria that do not hold, or a request that no longer stands."""
    request = latest_request(registered.here.model, registered.state.records)
    if decision.get("awaiting_approval") and request is not None:
        again = ("rlhf promote", "judges it again")
        return _Standing(OPEN, headline, f"{request.closed_because()}.", _decided_by(request.followed_by), again)
    unmet = tuple(
        UnmetCondition(criterion["name"], criterion["measured"], _with_signs(criterion["required"]))
        for criterion in decision.get("criteria") or ()
        if not criterion["passed"]
    )
    against = f" in place of version {decision['champion']}" if decision.get("champion") else ""
    return _Standing(
        OPEN,
        f"{headline}{against}",
        "" if unmet else f"Not promoted: {decision['reason']}",
        _decided_by(decision),
        EXPLAIN,
        unmet,
    )


def _with_signs(bound: str) -> str:
    """``<= 0.025`` as the conditions of gates are written."""
    sign, _, rest = bound.partition(" ")
    return f"{SIGNS[sign]} {rest}" if sign in SIGNS else bound


def _new_champion(record: Record, model: str) -> str | None:
    """The version that a record of the history made champion of ``model``, None if it made none."""
    moved = [m["version"] for m in record["moves"] if m["model"] == model and m["alias"] == CHAMPION]
    return None if not moved or moved[-1] is None else str(moved[-1])


def _present_champion(workspace: Path) -> str:
    """The sentence on the champion; empty where the registry does not answer, which may be why nothing is in it."""
    if not has_record(workspace):
        return ""
    name = load_section(workspace, "registry", RegistryConfig).policy
    try:
        return _champion_sentence(name, aliases_of(registered_model(connect(workspace), name)).get(CHAMPION))
    except RlhfError:
        return ""


def _champion_sentence(model: str, number: str | None) -> str:
    return f"The champion of {model} is version {number}." if number else f"{model} has no champion."


def _decided_by(record: Record | None) -> str:
    if record is None:
        return ""
    return f"Decided by {record.get('who') or 'unknown'}, {utc_minute(str(record['time']))}"


RECORD = "release.json"


def write_release_page(workspace: Path, notes: RunNotes | None = None) -> Path | None:
    """Write ``release.html`` by what is true now, and attach it to the run that registered the version.

    Args:
        notes: What the run that wrote the report said; None for what it said when the page was written last.

    Returns:
        The page; None where there is no report, or one without a place for it.

    Raises:
        RlhfError: The registry does not answer. A page of the same report stays.
    """
    from rlhf_core.evaluation.report.render import with_release

    report, page = workspace / REPORT_PAGE, workspace / RELEASE_PAGE
    if current_page(workspace) is None:
        page.unlink(missing_ok=True)
    text = report.read_text(encoding="utf-8", errors="replace") if report.is_file() else ""
    if BEGIN not in text:
        return None
    digest = sha256_file(report)
    notes = notes or _kept_notes(workspace, digest)
    decision = read_release_decision(workspace, notes)
    rendered = with_release(text, decision)
    if rendered is None:
        return None
    atomic_write_text(page, rendered)
    record = {"report_sha256": digest, "notes": asdict(notes), "decision": asdict(decision)}
    atomic_write_json(private_path(workspace, RECORD), record)
    _attach(workspace, page, notes)
    return page


def current_page(workspace: Path) -> Path | None:
    """Return ``release.html`` if it was made of the report that is there now; None otherwise."""
    page, report = workspace / RELEASE_PAGE, workspace / REPORT_PAGE
    if not page.is_file() or not report.is_file():
        return None
    try:
        made_of = read_json(workspace / PRIVATE / RECORD).get("report_sha256")
    except DataError:
        return None
    return page if made_of == sha256_file(report) else None


def _kept_notes(workspace: Path, report_sha256: str) -> RunNotes:
    """The notes of the page's last writing if that was of the same report, else none."""
    try:
        record = read_json(workspace / PRIVATE / RECORD)
        return RunNotes(**record["notes"]) if record["report_sha256"] == report_sha256 else RunNotes()
    except (DataError, KeyError, TypeError):
        return RunNotes()


def _attach(workspace: Path, page: Path, notes: RunNotes) -> None:
    """Put the page beside the evidence of the version that it is about, if there is one."""
    here = version_of_policy(workspace, notes)
    if here is None:
        return
    client = connect(workspace)
    run_id = get_version(client, here.model, here.version).run_id
    if run_id:
        with registry_errors(f"attach {page.name} to {here.model} version {here.version}"):
            client.log_artifact(run_id, str(page))


def try_release_page(workspace: Path, notes: RunNotes | None = None) -> str:
    """Write the page; return why it could not be brought up to date, empty if it was or there is no report."""
    try:
        write_release_page(workspace, notes)
    except (RlhfError, OSError) as error:
        return f"{RELEASE_PAGE} was not brought up to date: {error}"
    return ""
