"""Decisions on a registered model: their reports, and the moves of aliases and tags that may be repeated.

From its entry on the decision stands. Every step after it may be done again, in this order: ``@previous``,
``@champion``, tags, the report, and last a tag of the model that says which entry was carried out. Whoever uses the
registry next completes what comes after that entry, from any workspace.

Events on Prefect are sent after the decision is in the history and the aliases have moved, to the server of
``PREFECT_API_URL`` or of a running ``rlhf up``. A decision that is completed after an interruption sends its events
again, with the same ids.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID, uuid4, uuid5

from flows.prefect_server.services import known_server
from flows.registry.aliases import read_aliases, registered_model, registry_errors
from flows.registry.history import DECLINE, ENTRY_LIMIT, REQUEST, history_ledger, read_history
from flows.registry.workspace import actor
from rlhf_core.config.operations import RegistryConfig
from rlhf_core.errors import RlhfError
from rlhf_core.evaluation.promotion import Criterion
from rlhf_core.storage.files import permitted, read_json

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import RegisteredModel


FOLDER = Path(".rlhf") / "promotions"
Record = TypeVar("Record", bound=Mapping[str, Any])
TAG_LIMIT = 5000  # MLflow refuses longer values


def utc_now() -> str:
    """Return the time as ISO 8601 in UTC, with microseconds, so that decisions sort by it."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


@dataclass(frozen=True)
class PromotionDecision:
    """Whether ``challenger`` takes the place of ``champion``, and on what grounds.

    ``bar`` is the win rate that every judge's lower 95 % bound must exceed, ``question`` and ``match`` are what was
    played and how it went, ``criteria`` what was required of it, ``attempt`` the number of the match among those on the
    same prompts. ``unchanged`` marks a decision that says nothing new and leaves no report. ``awaiting_approval`` says
    that everything required holds and a person has to approve it, ``approval`` who did or declined, and why. ``who``
    is the person or job that decided.
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

    def to_approve(self, *, unchanged: bool) -> PromotionDecision:
        """This promotion as a request for approval; ``unchanged`` if it was requested before."""
        return replace(self, promoted=False, awaiting_approval=True, unchanged=unchanged)


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
    model: str,
    version: str,
    decision: Mapping[str, Any],
    decision_id: str | None = None,
) -> Path:
    """Write the report, tag ``version`` with the decision, attach the report to the run that registered it.

    Repeating it with the same ``decision_id`` changes nothing.
    """
    path = write_decision(workspace, decision, decision_id or uuid4().hex)
    tags = {"decision.action": decision["action"], "decision.reason": decision["reason"], "decision.report": path.name}
    if decision["action"] == "promote":
        tags["decision.promoted"] = str(decision["promoted"]).lower()
    for key, value in tags.items():
        client.set_model_version_tag(model, version, key, value[:TAG_LIMIT])
    run_id = client.get_model_version(model, version).run_id
    if run_id:
        client.log_artifact(run_id, str(path), "promotions")
    return path


def report_name(decision: Mapping[str, Any], decision_id: str) -> str:
    """Return the file name of a report: time, action and id of the decision."""
    moment = "".join(character for character in decision["time"].partition("+")[0] if character.isalnum())
    return f"{moment}-{decision['action']}-{decision_id[:8]}.json"


def write_decision(workspace: Path, decision: Mapping[str, Any], decision_id: str) -> Path:
    """Write ``decision`` under its time, action and id, read-only; a report that exists is never overwritten."""
    folder = workspace / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / report_name(decision, decision_id)
    if path.exists():
        return path
    descriptor, temporary = tempfile.mkstemp(dir=folder, suffix=".part")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(json.dumps(decision, indent=2, sort_keys=True) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, permitted(0o444))
        os.rename(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return path


def read_decisions(workspace: Path) -> list[dict[str, Any]]:
    """All decisions of a workspace, oldest first."""
    return [read_json(path) for path in sorted((workspace / FOLDER).glob("*.json"))]


APPROVAL_EVENTS = {REQUEST: "rlhf.approval.requested", DECLINE: "rlhf.approval.declined"}
LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class RegistryEvent:
    """What happened to a version of the registered model ``model``.

    Attributes:
        name: ``rlhf.ALIAS.changed``, ``rlhf.approval.requested`` or ``rlhf.approval.declined``.
        version: The version that has the alias now, or that waits for approval; None if the alias was removed.
        before: The version that had the alias before.
    """

    name: str
    model: str
    version: str | None
    before: str | None = None
    alias: str = ""

    def as_request(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """The event as Prefect's API expects it; ``record`` is the entry of the history behind it."""
        labels = {"rlhf.alias": self.alias, "rlhf.version": self.version, "rlhf.action": record["action"]}
        payload = {"model": self.model, "alias": self.alias, "version": self.version, "before": self.before}
        return {
            "id": str(uuid5(UUID(hex=record["id"]), f"{self.name} {self.model}")),
            "event": self.name,
            "occurred": datetime.fromisoformat(record["time"]).isoformat(),
            "resource": {
                "prefect.resource.id": f"rlhf.registered-model.{self.model}",
                "prefect.resource.name": self.model,
                **{key: value for key, value in labels.items() if value},
            },
            "payload": payload | {key: record[key] for key in ("action", "who", "reason", "time", "number")},
        }


def registry_events(record: Mapping[str, Any], earlier: Sequence[Mapping[str, Any]]) -> list[RegistryEvent]:
    """The events of one entry of the history.

    Args:
        earlier: The entries before it, which say what its aliases pointed to.
    """
    pointed = {(move["model"], move["alias"]): move["version"] for entry in earlier for move in entry["moves"]}
    events = []
    for move in record["moves"]:
        model, alias, version = move["model"], move["alias"], move["version"]
        before = pointed.get((model, alias))
        if version != before:
            events.append(RegistryEvent(f"rlhf.{alias}.changed", model, version, before, alias))
    if name := APPROVAL_EVENTS.get(record["action"]):
        events.append(RegistryEvent(name, record["model"], record["decided_on"]))
    return events


def emit_events(workspace: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Send the events of the last of ``records`` of a history; a server that does not take them is a warning."""
    events = registry_events(records[-1], records[:-1])
    if not events:
        return
    try:
        with known_server(workspace) as client:
            if client is not None:
                response = client.request("POST", "/events", json=[event.as_request(records[-1]) for event in events])
                response.raise_for_status()
    except RlhfError as error:
        names = ", ".join(event.name for event in events)
        LOGGER.warning("the events %s were not sent: %s; the decision stands", names, error)


DONE_TAG = "rlhf.decisions_done"
HISTORY_TAG = "rlhf.champions"
HISTORY_LIMIT = 200


@dataclass(frozen=True)
class AliasMove:
    """Point ``alias`` of ``model`` to ``version``, or remove it (None)."""

    model: str
    alias: str
    version: str | None


@dataclass(frozen=True)
class VersionTag:
    """Set tag ``key`` of a version to ``value``, or remove it (None)."""

    model: str
    version: str
    key: str
    value: str | None


@dataclass(frozen=True)
class AliasTransaction:
    """Everything that one decision changes in the registry, and the entry of the history that says so.

    Attributes:
        moves: In the order in which they are made.
        action: What the history calls it, such as ``promote``, ``rollback`` or ``register`` (the challenger).
        history: The versions that have been champion, oldest first, the new champion last; empty if the champion stays.
        decision: The report, empty if there is none.
        decided_on: The version of ``model`` that the report is attached to.
        reason: Why, in one line.
        model_tags: New tags of ``model``.
        number: Its number in the history, 0 before it is committed.
    """

    model: str
    moves: tuple[AliasMove, ...]
    version_tags: tuple[VersionTag, ...] = ()
    history: tuple[str, ...] = ()
    decision: Mapping[str, Any] = field(default_factory=dict)
    decided_on: str = ""
    action: str = ""
    reason: str = ""
    model_tags: Mapping[str, str] = field(default_factory=dict)
    number: int = 0
    who: str = field(default_factory=actor)
    time: str = field(default_factory=utc_now)
    id: str = field(default_factory=lambda: uuid4().hex)

    def to_json(self) -> str:
        """The entry; the match, which is in the report, loses its details where the whole is too long."""
        fields = asdict(self)
        text = json.dumps(fields, sort_keys=True)
        if len(text) > ENTRY_LIMIT:
            kept = self.decision.keys() - {"match", "question", "criteria"}
            fields["decision"] = {key: self.decision[key] for key in kept}
            text = json.dumps(fields, sort_keys=True)
        if len(text) > ENTRY_LIMIT:
            raise RlhfError(
                f"the decision is too long to be recorded: shorten its reason by {len(text) - ENTRY_LIMIT} characters"
            )
        return text

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> AliasTransaction:
        """The decision behind an entry of the history."""
        lists = {
            "moves": tuple(AliasMove(**move) for move in record["moves"]),
            "version_tags": tuple(VersionTag(**tag) for tag in record["version_tags"]),
            "history": tuple(record["history"]),
        }
        return cls(**{**record, **lists})


def commit(
    client: MlflowClient,
    workspace: Path,
    transaction: AliasTransaction,
    records: Sequence[Mapping[str, Any]],
    model: RegisteredModel | None = None,
) -> Path | None:
    """Record the decision and carry it out; returns its report, None if there is none.

    Args:
        records: The history that the decision was made on.
        model: The registered model, if it has just been looked up.

    Raises:
        EntryTaken: The history has grown since: what was decided on is no longer so. Nothing has moved.
        RlhfError: The registry refuses.
    """
    transaction = replace(transaction, number=len(records) + 1)
    history_ledger(client, transaction.model, model).append(transaction.number, transaction.to_json())
    return _carry_out(client, workspace, transaction)


def finish_interrupted(
    client: MlflowClient, workspace: Path, config: RegistryConfig
) -> tuple[RegisteredModel | None, Sequence[dict[str, Any]]]:
    """Complete the decisions that earlier calls were interrupted in, if there are any.

    Returns the registered policy and its history, for :func:`commit`.

    Raises:
        RlhfError: The registry does not answer, or the history cannot be read: nothing is decided on it.
    """
    while True:
        model = registered_model(client, config.policy)
        records = [] if model is None else read_history(client, config.policy, model)
        left = unfinished(model, records)
        if not left:
            return model, records
        for record in left:
            _carry_out(client, workspace, AliasTransaction.from_record(record))


def pending(client: MlflowClient, config: RegistryConfig) -> AliasTransaction | None:
    """The newest decision that stands and was not carried out to its end, or None."""
    model = registered_model(client, config.policy)
    left = [] if model is None else unfinished(model, read_history(client, config.policy, model))
    return AliasTransaction.from_record(left[-1]) if left else None


def unfinished(model: RegisteredModel | None, records: Sequence[Record]) -> Sequence[Record]:
    """Return the decisions among ``records`` that were not carried out to their end."""
    done = "0" if model is None else model.tags.get(DONE_TAG, "0")
    return records[int(done) if done.isdecimal() else 0 :]


def champion_history(model: RegisteredModel | None) -> tuple[str, ...]:
    """The versions that have been champion, oldest first; those of rollbacks are gone. Empty where nothing is known."""
    text = "" if model is None else model.tags.get(HISTORY_TAG, "")
    return tuple(number for number in text.split(",") if number)


def _carry_out(client: MlflowClient, workspace: Path, transaction: AliasTransaction) -> Path | None:
    """Every step may have been done before; what is as it shall be is not set again."""
    report = None
    with registry_errors("complete the decision; the next `rlhf` command that uses it goes on with it"):
        _move_aliases(client, transaction.moves)
        tags = dict(transaction.model_tags)
        if transaction.history:
            tags[HISTORY_TAG] = ",".join(transaction.history[-HISTORY_LIMIT:])
        for key, value in tags.items():
            client.set_registered_model_tag(transaction.model, key, value)
        _write_version_tags(client, transaction.version_tags)
        if transaction.decision:
            report = publish_decision(
                client, workspace, transaction.model, transaction.decided_on, transaction.decision, transaction.id
            )
        client.set_registered_model_tag(transaction.model, DONE_TAG, str(transaction.number))
    records = read_history(client, transaction.model)
    emit_events(workspace, records[: transaction.number])
    if len(records) > transaction.number:  # another machine decided meanwhile, and these moves may have undone its own
        _carry_out(client, workspace, AliasTransaction.from_record(records[-1]))
    return report


def _move_aliases(client: MlflowClient, moves: Sequence[AliasMove]) -> None:
    names = dict.fromkeys(move.model for move in moves)
    aliases = {name: read_aliases(client, name) for name in names}
    for move in moves:
        if aliases[move.model].get(move.alias) == move.version:
            continue
        if move.version is None:
            client.delete_registered_model_alias(move.model, move.alias)
        else:
            client.set_registered_model_alias(move.model, move.alias, move.version)


def _write_version_tags(client: MlflowClient, tags: Sequence[VersionTag]) -> None:
    for tag in tags:
        if tag.value is not None:
            client.set_model_version_tag(tag.model, tag.version, tag.key, tag.value[:TAG_LIMIT])
        elif tag.key in client.get_model_version(tag.model, tag.version).tags:
            client.delete_model_version_tag(tag.model, tag.version, tag.key)
