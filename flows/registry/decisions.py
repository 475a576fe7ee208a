"""Decisions on a registered model: how they are recorded, carried out and reported.

From its entry on the decision stands. Every step after it may be done again, in this order:
``@previous``, ``@champion``, tags, the report, and last a tag of the model that says which entry
was carried out. Whoever uses the registry next completes what comes after that entry, from any
workspace.

Events on Prefect are sent after the decision is in the history and the aliases have moved, to the
server of ``PREFECT_API_URL`` or of a running ``rlhf up``. A decision that is completed after an
interruption sends its events again, with the same ids.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4, uuid5

from flows.prefect_server.services import known_server
from flows.registry.client import (
    PREVIOUS,
    get_version,
    prepare_tracking,
    read_aliases,
    registry_address,
    registry_errors,
    version_numbers,
)
from flows.registry.history import (
    DECLINE,
    DONE_TAG,
    ENTRY_LIMIT,
    REQUEST,
    Entry,
    Ledger,
    ReleaseState,
    read_history,
)
from flows.registry.policies import active_policies
from flows.workspace import actor, locked
from rlhf_core.config.loading import load_section
from rlhf_core.config.operations import RegistryConfig
from rlhf_core.errors import ModelError, RlhfError
from rlhf_core.evaluation.promotion import Criterion
from rlhf_core.storage.files import (
    atomic_write_json,
    naming_full_disks,
    own_temporary_folder,
    permitted,
    read_json,
)
from rlhf_core.tracking.stage_run import default_environment

if TYPE_CHECKING:
    from mlflow import MlflowClient


FOLDER = Path(".rlhf") / "promotions"
REPORT_TAG = "decision.report"  # of a version: the report of the newest decision on it
TAG_LIMIT = 5000  # MLflow refuses longer values
LOGGER = logging.getLogger(__name__)


def utc_now() -> str:
    """Return the time as ISO 8601 in UTC, with microseconds, so that decisions sort by it."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


@dataclass(frozen=True)
class PromotionDecision:
    """Whether ``challenger`` takes the place of ``champion``, and on what grounds.

    ``bar`` is the win rate that every judge's lower 95 % bound must exceed, ``question`` and
    ``match`` are what was played and how it went, ``criteria`` what was required of it, ``attempt``
    the number of the match among those on the same prompts. ``unchanged`` marks a decision that
    says nothing new and leaves no report. ``awaiting_approval`` says that everything required holds
    and a person has to approve it, ``approval`` who did or declined, and why. ``who`` is the person
    or job that decided.
    """

    model: str
    challenger: str
    champion: str | None
    bar: float
    promoted: bool = False
    reason: str = ""
    forced: str | None = None
    question: Mapping[str, Any] | None = None
    match: Mapping[str, Any] | None = None
    attempt: int | None = None
    criteria: tuple[Criterion, ...] = ()
    unchanged: bool = False
    awaiting_approval: bool = False
    approval: str = ""
    dry_run: bool = False
    action: str = "promote"
    who: str = field(default_factory=actor)
    time: str = field(default_factory=utc_now)
    report: Path | None = None

    @property
    def is_champion(self) -> bool:
        """Whether the challenger is champion after this decision (or would be, in a dry run)."""
        return self.promoted or self.champion == self.challenger

    def describe(self) -> str:
        """What was decided and why, in one line."""
        if self.awaiting_approval:
            commands = "`rlhf approve` or `rlhf decline --reason TEXT` decides"
            return f"not promoted yet: version {self.challenger} waits for approval ({self.reason}); {commands}"
        return f"{'promoted' if self.promoted else 'not promoted'}: {self.reason}"

    def refused(self, reason: str, *, unchanged: bool = False) -> PromotionDecision:
        """This decision as a refusal."""
        return replace(self, promoted=False, reason=reason, unchanged=unchanged)

    def accepted(self, reason: str) -> PromotionDecision:
        """This decision as a promotion."""
        return replace(self, promoted=True, reason=reason)


@dataclass(frozen=True)
class RollbackDecision:
    """``champion`` took the place of ``replaced``, which is marked as rolled back."""

    model: str
    champion: str
    replaced: str
    reason: str
    action: str = "rollback"
    who: str = field(default_factory=actor)
    time: str = field(default_factory=utc_now)
    report: Path | None = None


def as_report(decision: PromotionDecision | RollbackDecision) -> dict[str, Any]:
    """The content of the report: every field but its path."""
    return {key: value for key, value in asdict(decision).items() if key != "report"}


def publish_decision(
    client: MlflowClient,
    workspace: Path,
    version: str,
    decision: Mapping[str, Any],
    decision_id: str = "",
) -> Path:
    """Write the report, attach it to the run that registered ``version``, and tag the version.

    The report is read-only and never written over; its name is the last tag. Repeating it with the
    same ``decision_id`` changes nothing.
    """
    path = workspace / FOLDER / report_name(decision, decision_id or uuid4().hex)
    if not path.exists():
        atomic_write_json(path, decision)
    path.chmod(permitted(0o444))
    run_id = client.get_model_version(decision["model"], version).run_id
    if run_id:
        client.log_artifact(run_id, str(path), "promotions")
    tags = {"decision.action": decision["action"], "decision.reason": decision["reason"]}
    if decision["action"] == "promote":
        tags["decision.promoted"] = str(decision["promoted"]).lower()
    for key, value in {**tags, REPORT_TAG: path.name}.items():
        client.set_model_version_tag(decision["model"], version, key, value[:TAG_LIMIT])
    return path


def report_name(decision: Mapping[str, Any], decision_id: str) -> str:
    """Return the file name of a report: time, action and id of the decision."""
    moment = re.sub(r"\W", "", decision["time"].partition("+")[0])
    return f"{moment}-{decision['action']}-{decision_id[:8]}.json"


def read_report(workspace: Path, name: str) -> dict[str, Any]:
    """The report of this name; empty where the workspace has none."""
    path = workspace / FOLDER / Path(name).name  # a tag on a server may say anything
    try:
        return read_json(path) if path.is_file() else {}
    except OSError:  # too long a name
        return {}


APPROVAL_EVENTS = {REQUEST: "rlhf.approval.requested", DECLINE: "rlhf.approval.declined"}


def registry_events(entry: Entry, earlier: Sequence[Entry]) -> list[dict[str, Any]]:
    """The events of one entry of the history, as Prefect's API expects them.

    They are ``rlhf.ALIAS.changed``, ``rlhf.approval.requested`` and ``rlhf.approval.declined``.

    Args:
        earlier: The entries before it, which say what its aliases pointed to.
    """
    pointed = {}
    for other in earlier:
        for moved in other["moves"]:
            pointed[moved["model"], moved["alias"]] = moved["version"]
    happened = []
    for moved in entry["moves"]:
        before = pointed.get((moved["model"], moved["alias"]))
        if before != moved["version"]:
            happened.append((f"rlhf.{moved['alias']}.changed", {**moved, "before": before}))
    if name := APPROVAL_EVENTS.get(entry["action"]):
        decided_on = entry["decided_on"]
        about = {"model": entry["model"], "alias": "", "version": decided_on, "before": None}
        happened.append((name, about))
    decided = {key: entry[key] for key in ("action", "who", "reason", "time", "number")}
    events = []
    for name, about in happened:
        resource = {
            "prefect.resource.id": f"rlhf.registered-model.{about['model']}",
            "prefect.resource.name": about["model"],
            "rlhf.action": entry["action"],
        }
        for key in ("alias", "version"):
            if about[key]:
                resource[f"rlhf.{key}"] = about[key]
        event = {
            "id": str(uuid5(UUID(hex=entry["id"]), f"{name} {about['model']}")),
            "event": name,
            "occurred": datetime.fromisoformat(entry["time"]).isoformat(),
            "resource": resource,
            "payload": about | decided,
        }
        events.append(event)
    return events


def _emit_events(workspace: Path, entries: Sequence[Entry]) -> None:
    """Send the events of the last of ``entries``; a server that refuses them is a warning."""
    events = registry_events(entries[-1], entries[:-1])
    if not events:
        return
    try:
        with known_server(workspace) as client:
            if client is not None:
                client.request("POST", "/events", json=events).raise_for_status()
    except RlhfError as error:
        names = ", ".join(event["event"] for event in events)
        LOGGER.warning("the events %s were not sent: %s; the decision stands", names, error)


CHAMPIONS_LIMIT = 200  # that an entry lists
REPORTED = ("match", "question", "criteria")  # what the report has, and a long entry does not


def new_entry(
    model: str,
    action: str,
    reason: str,
    *,
    moves: Sequence[tuple[str, str, str | None]] = (),
    version_tags: Sequence[tuple[str, str, str, str | None]] = (),
    champions: Sequence[str] = (),
    decision: PromotionDecision | RollbackDecision | None = None,
    model_tags: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """An entry of the history: a decision, and everything that it changes in the registry.

    Args:
        action: What the history calls it, such as ``promote``, ``rollback`` or ``register`` (the
            challenger).
        reason: Why, in one line.
        moves: Model, alias, and the version that it shall point to, None for none, in this order.
        version_tags: Model, version, tag, and its new value, None to remove it.
        champions: The versions that have been champion, oldest first, the new one last; empty if
            the champion stays.
        decision: Its report is attached to the version that became champion, or did not.
        model_tags: New tags of ``model``.
    """
    decided_on = ""
    if isinstance(decision, PromotionDecision):
        decided_on = decision.challenger
    elif decision is not None:
        decided_on = decision.champion
    report = {} if decision is None else as_report(decision)
    moved = []
    for of_model, alias, version in moves:
        moved.append({"model": of_model, "alias": alias, "version": version})
    tags = []
    for of_model, version, key, value in version_tags:
        tags.append({"model": of_model, "version": version, "key": key, "value": value})
    return {
        "model": model,
        "action": action,
        "reason": reason,
        "moves": moved,
        "version_tags": tags,
        "history": [*champions[-CHAMPIONS_LIMIT:]],
        "decision": report,
        "decided_on": decided_on,
        "model_tags": dict(model_tags or {}),
        "who": actor(),
        "time": utc_now(),
        "id": uuid4().hex,
    }


def commit(state: ReleaseState, entry: Entry) -> Path | None:
    """Record the decision that was made on ``state`` and carry it out; returns its report if any.

    Raises:
        ModelError: An alias would point to a version that a registry policy refuses. Nothing has
            moved.
        EntryTaken: The history has grown since: what was decided on is no longer so. Nothing has
            moved.
        RlhfError: The registry refuses.
    """
    for moved in entry["moves"]:
        if moved["version"] is not None and moved["alias"] != PREVIOUS:  # which answers nobody
            _require_accepted(state.client, state.workspace, moved["model"], moved["version"])
    entry = _after({**entry, "number": len(state.entries) + 1}, state.entries)
    text = json.dumps(entry, sort_keys=True)
    if len(text) > ENTRY_LIMIT:  # the report has the whole
        short = {key: value for key, value in entry["decision"].items() if key not in REPORTED}
        text = json.dumps({**entry, "decision": short}, sort_keys=True)
    Ledger.open(state.client, state.name, state.model).append(entry["number"], text)
    return _carry_out(state.client, state.workspace, entry)


def _after(entry: dict[str, Any], earlier: Sequence[Entry]) -> dict[str, Any]:
    """The entry with a time after those of ``earlier``, by which reports and pages are ordered."""
    last = max((str(other["time"]) for other in earlier), default="")
    if entry["time"] > last:
        return entry
    LOGGER.warning(
        "the clock of this host says %s, and the last decision was made at %s: the clock is wrong, or was then; this "
        "decision is recorded as made right after that one", entry["time"], last,
    )  # fmt: skip
    after = datetime.fromisoformat(last) + timedelta(microseconds=1)
    time = after.isoformat(timespec="microseconds")
    decision = entry["decision"]
    if decision:
        decision = {**decision, "time": time}
    return {**entry, "time": time, "decision": decision}


def finish_interrupted(client: MlflowClient, workspace: Path, name: str) -> ReleaseState:
    """Read a registered model, after completing decisions that were interrupted."""
    while (state := ReleaseState.read(client, workspace, name)).unfinished:
        for entry in state.unfinished:
            _carry_out(client, workspace, entry)
    return state


def _carry_out(client: MlflowClient, workspace: Path, entry: Entry) -> Path | None:
    """Carry out a decision; steps already carried out are skipped.

    What the entry says of a version that was deleted in MLflow since cannot be done, and holds
    nothing else up.
    """
    report, model = None, entry["model"]
    with registry_errors(
        client, "complete the decision; the next `rlhf` command that uses it goes on with it"
    ):
        parts = (*entry["moves"], *entry["version_tags"])
        names = {model, *(part["model"] for part in parts)}
        aliases = {name: read_aliases(client, name) for name in names}
        existing = {name: version_numbers(client, name) for name in names}
        for moved in entry["moves"]:
            name, alias, version = moved["model"], moved["alias"], moved["version"]
            if aliases[name].get(alias) == version:
                continue
            if version is None:
                client.delete_registered_model_alias(name, alias)
                continue
            if version not in existing[name]:
                continue
            try:
                if alias != PREVIOUS:
                    _require_accepted(client, workspace, name, version)
            except ModelError as error:
                # What another program has written into the history must not block later decisions.
                LOGGER.warning("no alias is pointed to %s version %s: %s", name, version, error)
                continue
            client.set_registered_model_alias(name, alias, version)
        for key, value in entry["model_tags"].items():
            client.set_registered_model_tag(model, key, value)
        for tag in entry["version_tags"]:
            name, version, key = tag["model"], tag["version"], tag["key"]
            if version not in existing[name]:
                continue
            if tag["value"] is not None:
                client.set_model_version_tag(name, version, key, tag["value"][:TAG_LIMIT])
            elif key in client.get_model_version(name, version).tags:
                client.delete_model_version_tag(name, version, key)
        if entry["decision"] and entry["decided_on"] in existing[model]:
            report = publish_decision(
                client, workspace, entry["decided_on"], entry["decision"], entry["id"]
            )
        client.set_registered_model_tag(model, DONE_TAG, str(entry["number"]))
    entries = read_history(client, model)
    _emit_events(workspace, entries[: entry["number"]])
    if len(entries) > entry["number"]:
        # Another machine decided meanwhile, and these moves may have undone its own.
        _carry_out(client, workspace, entries[-1])
    return report


def _require_accepted(client: MlflowClient, workspace: Path, name: str, number: str) -> None:
    """Raise what a registry policy, such as signatures, has against an alias of a version."""
    config = load_section(workspace, "registry", RegistryConfig)
    for policy in active_policies(config):
        policy.verify_version(client, workspace, config, get_version(client, name, number), None)


@contextmanager
def registry_lock(workspace: Path, model: str) -> Iterator[None]:
    """Hold the lock of the registered model ``model`` for the block; wait for another holder.

    The file lies beside a SQLite database, and for a server in the user's own folder for temporary
    files. Processes of other machines and users are not locked out: of two that decide at the same
    time, the second one's entry in the history is refused
    (:meth:`flows.registry.history.Ledger.append`).
    """
    registry = registry_address(workspace)
    folder = own_temporary_folder()
    if registry.startswith("sqlite"):
        folder = Path(registry.removeprefix("sqlite:///")).parent
    digest = hashlib.sha256(f"{registry} {model}".encode()).hexdigest()[:16]
    with locked(folder, f"registry-{digest}.lock", wait=True):
        yield


# After 4, 8, 16 and 32 seconds; by itself MLflow retries for four minutes.
RETRIES = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "5"}


@contextmanager
def registry_session(workspace: Path) -> Iterator[ReleaseState]:
    """Lock the registered policy for the block, after completing what an earlier call began."""
    workspace = workspace.resolve()
    name = load_section(workspace, "registry", RegistryConfig).policy
    with naming_full_disks(workspace):
        client, _ = prepare_tracking(workspace)
        with registry_lock(workspace, name), default_environment(RETRIES):
            yield finish_interrupted(client, workspace, name)
