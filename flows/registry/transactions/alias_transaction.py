"""A decision on a registered model: an entry of its history first, then moves of aliases and tags that may be repeated.

From its entry on the decision stands. Every step after it may be done again, in this order: ``@previous``,
``@champion``, tags, the report, and last a tag of the model that says which entry was carried out. Whoever uses the
registry next completes what comes after that entry, from any workspace.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from flows.registry.governance.history import history_ledger, read_history
from flows.registry.governance.identity import actor
from flows.registry.governance.ledger import ENTRY_LIMIT
from flows.registry.transactions.alias_events import emit_events
from flows.registry.transactions.aliases import read_aliases, registered_model, registry_errors
from flows.registry.transactions.decisions import TAG_LIMIT, publish_decision, utc_now
from rlhf_core.config.operations.operations import RegistryConfig
from rlhf_core.errors import RlhfError

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import RegisteredModel

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
        unfinished = _unfinished(model, records)
        if not unfinished:
            return model, records
        for record in unfinished:
            _carry_out(client, workspace, AliasTransaction.from_record(record))


def pending(client: MlflowClient, config: RegistryConfig) -> AliasTransaction | None:
    """The newest decision that stands and was not carried out to its end, or None."""
    model = registered_model(client, config.policy)
    unfinished = [] if model is None else _unfinished(model, read_history(client, config.policy, model))
    return AliasTransaction.from_record(unfinished[-1]) if unfinished else None


def _unfinished(model: RegisteredModel | None, records: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
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
