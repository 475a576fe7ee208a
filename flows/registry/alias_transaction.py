"""Alias moves of a promotion or rollback as one transaction: an intent is written first, and the next call redoes it.

The intent is a tag of the registered policy, so whoever uses the registry next finds it, from any workspace. Until it
is written nothing has moved; once it is written the decision stands, and every step after it may be repeated. The tag
is removed last.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from flows.registry.aliases import registered_model, registry_errors
from flows.registry.decisions import publish_decision
from rlhf_core.config.operations import RegistryConfig
from rlhf_core.errors import RlhfError

if TYPE_CHECKING:
    from mlflow import MlflowClient

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
    """Everything that one decision changes in the registry.

    ``history`` are the versions that have been champion, oldest first, the new champion last. ``decision`` is the
    report; ``decided_on`` is the version of ``model`` that it is attached to.
    """

    model: str
    moves: tuple[AliasMove, ...]
    version_tags: tuple[VersionTag, ...]
    history: tuple[str, ...]
    decision: Mapping[str, Any]
    decided_on: str
    id: str = field(default_factory=lambda: uuid4().hex)

    def to_json(self) -> str:
        """The intent; the match loses its details where the whole is too long for a tag."""
        fields = asdict(self)
        text = json.dumps(fields, sort_keys=True)
        if len(text) > TAG_LIMIT:
            kept = self.decision.keys() - {"match", "question"}
            fields["decision"] = {key: self.decision[key] for key in kept}
            text = json.dumps(fields, sort_keys=True)
        if len(text) > TAG_LIMIT:
            raise RlhfError(f"the reason is too long to be recorded: shorten it by {len(text) - TAG_LIMIT} characters")
        return text

    @classmethod
    def from_json(cls, text: str) -> AliasTransaction:
        """The inverse of :meth:`to_json`."""
        fields: dict[str, Any] = json.loads(text)
        return cls(
            model=fields["model"],
            moves=tuple(AliasMove(**move) for move in fields["moves"]),
            version_tags=tuple(VersionTag(**tag) for tag in fields["version_tags"]),
            history=tuple(fields["history"]),
            decision=fields["decision"],
            decided_on=fields["decided_on"],
            id=fields["id"],
        )


def commit(client: MlflowClient, workspace: Path, transaction: AliasTransaction) -> Path:
    """Write the intent, then carry it out; returns the decision's report. ``RlhfError`` if the registry refuses."""
    with registry_errors("record the intent of the decision; nothing has changed"):
        client.set_registered_model_tag(transaction.model, INTENT_TAG, transaction.to_json())
    return _carry_out(client, workspace, transaction)


def finish_interrupted(client: MlflowClient, workspace: Path, config: RegistryConfig) -> Path | None:
    """Complete the decision that an earlier call was interrupted in, if there is one; returns its report."""
    transaction = pending(client, config)
    return None if transaction is None else _carry_out(client, workspace, transaction)


def pending(client: MlflowClient, config: RegistryConfig) -> AliasTransaction | None:
    """The decision that was begun and not completed, or None."""
    model = registered_model(client, config.policy)
    text = None if model is None else model.tags.get(INTENT_TAG)
    return AliasTransaction.from_json(text) if text else None


def champion_history(client: MlflowClient, name: str) -> tuple[str, ...]:
    """The versions that have been champion, oldest first; those of rollbacks are gone. Empty where nothing is known."""
    model = registered_model(client, name)
    text = "" if model is None else model.tags.get(HISTORY_TAG, "")
    return tuple(number for number in text.split(",") if number)


def _carry_out(client: MlflowClient, workspace: Path, transaction: AliasTransaction) -> Path:
    """Every step may have been done before: each sets what shall be, whatever is."""
    with registry_errors("complete the decision; the next `rlhf` command that uses it goes on with it"):
        for move in transaction.moves:
            if move.version is None:
                client.delete_registered_model_alias(move.model, move.alias)
            else:
                client.set_registered_model_alias(move.model, move.alias, move.version)
        history = ",".join(transaction.history[-HISTORY_LIMIT:])
        client.set_registered_model_tag(transaction.model, HISTORY_TAG, history)
        _write_version_tags(client, transaction.version_tags)
        report = publish_decision(
            client, workspace, transaction.model, transaction.decided_on, transaction.decision, transaction.id
        )
        client.delete_registered_model_tag(transaction.model, INTENT_TAG)
    return report


def _write_version_tags(client: MlflowClient, tags: Sequence[VersionTag]) -> None:
    for tag in tags:
        if tag.value is not None:
            client.set_model_version_tag(tag.model, tag.version, tag.key, tag.value[:TAG_LIMIT])
        elif tag.key in client.get_model_version(tag.model, tag.version).tags:
            client.delete_model_version_tag(tag.model, tag.version, tag.key)
