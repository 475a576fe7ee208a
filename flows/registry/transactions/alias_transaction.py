"""Alias moves of a promotion or rollback as one transaction, recorded in the history before anything moves.

First the transaction is announced in a tag of the registered policy, so whoever uses the registry next finds it, from
any workspace. Then it becomes the next entry of the history (:mod:`flows.registry.governance.ledger`): from then on the
decision stands. Every step after it may be repeated, and the tag is removed last. An announcement that is not in the
history was never decided.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from flows.registry.governance.history import HEAD_TAG, chain_hash, checked_history, head_of, history_ledger
from flows.registry.governance.identity import actor
from flows.registry.governance.ledger import Ledger
from flows.registry.transactions.alias_events import emit_events
from flows.registry.transactions.aliases import read_aliases, registered_model, registry_errors
from flows.registry.transactions.decisions import publish_decision, utc_now
from rlhf_core.config.operations.operations import RegistryConfig
from rlhf_core.errors import RlhfError

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import RegisteredModel

INTENT_TAG = "rlhf.intent"
HISTORY_TAG = "rlhf.champions"
HISTORY_LIMIT = 200
TAG_LIMIT = 5000  # MLflow refuses longer values


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
        action: ``promote``, ``rollback``, ``register`` (the challenger) or ``terms``.
        history: The versions that have been champion, oldest first, the new champion last; empty if the champion stays.
        decision: The report, empty if there is none.
        decided_on: The version of ``model`` that the report is attached to.
        reason: Why, in one line.
        model_tags: New tags of ``model``.
        number: Its number in the history, 0 before it is committed.
        previous: :func:`chain_hash` of the entry before it.
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
    previous: str = ""
    who: str = field(default_factory=actor)
    time: str = field(default_factory=utc_now)
    id: str = field(default_factory=lambda: uuid4().hex)

    def to_json(self) -> str:
        """The intent; the match loses its details where the whole is too long for a tag."""
        fields = asdict(self)
        text = json.dumps(fields, sort_keys=True)
        if len(text) > TAG_LIMIT:
            kept = self.decision.keys() - {"match", "question", "criteria"}
            fields["decision"] = {key: self.decision[key] for key in kept}
            text = json.dumps(fields, sort_keys=True)
        if len(text) > TAG_LIMIT:
            raise RlhfError(
                f"the decision is too long to be recorded: shorten its reason (or the gates' conditions) by "
                f"{len(text) - TAG_LIMIT} characters"
            )
        return text

    @classmethod
    def from_json(cls, text: str) -> AliasTransaction:
        """The inverse of :meth:`to_json`; what versions before the history did not write stays empty."""
        fields: dict[str, Any] = {"who": "", "time": ""} | json.loads(text)
        fields["moves"] = tuple(AliasMove(**move) for move in fields["moves"])
        fields["version_tags"] = tuple(VersionTag(**tag) for tag in fields["version_tags"])
        fields["history"] = tuple(fields["history"])
        fields["action"] = fields.get("action") or fields["decision"].get("action", "")
        return cls(**fields)


def commit(
    client: MlflowClient,
    workspace: Path,
    transaction: AliasTransaction,
    entries: Sequence[str] | None = None,
    model: RegisteredModel | None = None,
) -> Path | None:
    """Announce and record the transaction, then carry it out; returns the decision's report, None if there is none.

    Args:
        entries: The history that the decision was made on; None for the one there is.
        model: The registered model, if it has just been looked up.

    Raises:
        EntryTaken: The history has grown since: what was decided on is no longer so. Nothing has moved.
        RlhfError: The registry refuses.
    """
    ledger = history_ledger(client, transaction.model, model)
    entries = ledger.entries() if entries is None else entries
    transaction = replace(transaction, number=len(entries) + 1, previous=chain_hash(entries[-1]) if entries else "")
    text = transaction.to_json()
    with registry_errors("record the intent of the decision; nothing has changed"):
        client.set_registered_model_tag(transaction.model, INTENT_TAG, text)
    ledger.append(transaction.number, text)
    return _carry_out(client, workspace, transaction, ledger)


def finish_interrupted(
    client: MlflowClient, workspace: Path, config: RegistryConfig
) -> tuple[RegisteredModel | None, Sequence[str]]:
    """Complete the decision that an earlier call was interrupted in, if there is one.

    Returns the registered policy and its history, for :func:`commit`.

    Raises:
        RlhfError: The registry does not answer, or the history was changed: nothing is decided on it.
    """
    before = registered_model(client, config.policy)
    if before is None:
        return None, ()
    ledger = history_ledger(client, config.policy, before)
    while True:
        entries = ledger.entries()
        checked_history(config.policy, entries, before)
        # Read after the history: what it holds has been carried out, or its announcement still stands.
        model = registered_model(client, config.policy)
        text = None if model is None else model.tags.get(INTENT_TAG)
        transaction = None if text is None else _decided(text, entries)
        if transaction is None:  # an announcement alone decides nothing; whoever made it may still be at work
            return model, entries
        if transaction.number:
            _carry_out(client, workspace, transaction, ledger)
        else:  # of a version that kept no history
            commit(client, workspace, transaction, entries, model)


def pending(client: MlflowClient, config: RegistryConfig) -> AliasTransaction | None:
    """The decision that stands and was not carried out to its end, or None."""
    model = registered_model(client, config.policy)
    if model is None or INTENT_TAG not in model.tags:
        return None
    return _decided(model.tags[INTENT_TAG], history_ledger(client, config.policy, model).entries())


def _decided(announcement: str, entries: Sequence[str]) -> AliasTransaction | None:
    """The decision behind the announcement in a tag, None if it was never made."""
    announced = AliasTransaction.from_json(announcement)
    if not announced.number:  # of a version that kept no history: the announcement was the decision
        return next(
            (entry for entry in map(AliasTransaction.from_json, entries) if entry.id == announced.id), announced
        )
    # Of two that announced the same number, the one in the history was decided.
    return AliasTransaction.from_json(entries[-1]) if len(entries) >= announced.number else None


def champion_history(model: RegisteredModel | None) -> tuple[str, ...]:
    """The versions that have been champion, oldest first; those of rollbacks are gone. Empty where nothing is known."""
    text = "" if model is None else model.tags.get(HISTORY_TAG, "")
    return tuple(number for number in text.split(",") if number)


def _carry_out(client: MlflowClient, workspace: Path, transaction: AliasTransaction, ledger: Ledger) -> Path | None:
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
        client.delete_registered_model_tag(transaction.model, INTENT_TAG)
    entries = ledger.entries()
    emit_events(workspace, entries, transaction.number)
    with registry_errors("note where the history ends; the decision stands"):
        client.set_registered_model_tag(transaction.model, HEAD_TAG, head_of(entries))
    if len(entries) > transaction.number:  # another machine decided meanwhile: the last decision holds
        _carry_out(client, workspace, AliasTransaction.from_json(entries[-1]), ledger)
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
