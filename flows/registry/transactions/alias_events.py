"""Prefect events about registered models: every change of an alias, every request for approval that is made or refused.

They are sent after the decision is in the history and the aliases have moved, to the server of ``PREFECT_API_URL`` or
of a running ``rlhf up``. A decision that is completed after an interruption sends its events again, with the same ids.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID, uuid5

from flows.prefect_server.services import known_server
from flows.registry.approval.request import DECLINE, REQUEST
from rlhf_core.errors import RlhfError

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
