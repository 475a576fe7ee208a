"""What was decided on a registered model: entries written once, and the state they lead to."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.registry.client import (
    CHALLENGER,
    CHAMPION,
    OWNER_TAG,
    aliases_of,
    connect,
    get_version,
    registered_model,
    registry_errors,
    tag_line,
    version_numbers,
    versions,
)
from rlhf_core.config.loading import load_section
from rlhf_core.config.operations import RegistryConfig
from rlhf_core.errors import RlhfError
from rlhf_core.tracking.origin import workspace_id

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion, RegisteredModel


LEDGER_TAG = "rlhf.ledger_run"
ENTRY_LIMIT = 5000  # characters; MLflow cuts parameters off at 6000


class EntryTaken(RlhfError):
    """Another process has written the entry of that number; nothing was changed."""


@dataclass(frozen=True)
class Ledger:
    """The entries ``KIND.NAME.1``, ``KIND.NAME.2``, … of the registered model ``name``.

    ``run_id`` is None as long as the model has no version; such a ledger is empty, and nothing can
    be appended. ``tagged`` says whether a tag of the model keeps it: versions may be deleted later.
    """

    client: MlflowClient
    name: str
    kind: str
    run_id: str | None
    tagged: bool

    @classmethod
    def open(
        cls,
        client: MlflowClient,
        name: str,
        model: RegisteredModel | None = None,
        *,
        kind: str = "history",
    ) -> Ledger:
        """Find the ledger of a registered model.

        Args:
            model: The registered model, if it has just been looked up.
        """
        model = model or registered_model(client, name)
        kept = None if model is None else model.tags.get(LEDGER_TAG)
        run_id = kept
        if run_id is None and model is not None and (listed := versions(client, name)):
            run_id = listed[-1].run_id
        return cls(client, name, kind, run_id, tagged=kept is not None)

    def entries(self) -> Sequence[str]:
        """Read all entries, oldest first.

        Raises:
            RlhfError: The run is gone, or an entry is missing between others.
        """
        if self.run_id is None:
            return ()
        with registry_errors(self.client, f"read the {self.kind} of {self.name}"):
            params = self.client.get_run(self.run_id).data.params
        prefix = self._key("")
        own = {}
        for key, text in params.items():
            number = key.removeprefix(prefix)
            if key.startswith(prefix) and number.isdecimal():
                own[number] = text
        entries = []
        for place in range(1, len(own) + 1):
            if str(place) not in own:
                raise RlhfError(
                    f"the {self.kind} of {self.name} lacks entry {place} (run {self.run_id} of MLflow); "
                    "nothing is decided on an incomplete record: restore MLflow's database from a backup"
                )
            entries.append(own[str(place)])
        return entries

    def append(self, number: int, text: str) -> None:
        """Write entry ``number``, for good. Writing the same text again changes nothing.

        Raises:
            EntryTaken: The entry exists with another text.
            RlhfError: The registry does not answer, or the text is too long.
        """
        from mlflow.exceptions import MlflowException

        if self.run_id is None:
            raise RlhfError(
                f"{self.name} has no version yet, so there is nothing to record about it"
            )
        if len(text) > ENTRY_LIMIT:
            raise RlhfError(
                f"an entry of the {self.kind} of {self.name} is too long: shorten its reason by "
                f"{len(text) - ENTRY_LIMIT} characters"
            )
        with registry_errors(
            self.client,
            f"record entry {number} in the {self.kind} of {self.name}; nothing has changed",
        ):
            if not self.tagged:
                self.client.set_registered_model_tag(self.name, LEDGER_TAG, self.run_id)
            try:
                self.client.log_param(self.run_id, self._key(str(number)), text)
            except MlflowException:  # of another value, but of a deleted run too
                if len(self.entries()) >= number:
                    raise EntryTaken(
                        f"{self.name} was changed from elsewhere meanwhile (entry {number} of its {self.kind}); "
                        "nothing has changed here: look at `rlhf history` and try again"
                    ) from None
                raise

    def _key(self, number: str) -> str:
        """The name of a parameter, in the characters that MLflow allows."""
        name = re.sub(r"[^\w. -]", "_", self.name)
        return f"{self.kind}.{name[:200]}.{number}"


Entry = Mapping[str, Any]  # see flows.registry.decisions.new_entry
FIELDS = {
    "action": str, "decided_on": str, "decision": dict, "history": list, "id": str, "model_tags": dict, "moves": list,
    "reason": str, "time": str, "version_tags": list, "who": str,
}  # fmt: skip
PARTS = {
    "moves": {"model", "alias", "version"},
    "version_tags": {"model", "version", "key", "value"},
}


def read_history(
    client: MlflowClient, name: str, model: RegisteredModel | None = None
) -> list[Entry]:
    """The decisions on the registered model ``name``, oldest first.

    Raises:
        RlhfError: The registry does not answer, or an entry is missing or no decision on ``name``.
    """
    entries: list[Entry] = []
    for number, text in enumerate(Ledger.open(client, name, model).entries(), start=1):
        try:
            entry = json.loads(text)
            readable = (entry["number"], entry["model"]) == (number, name)
            for key, kind in FIELDS.items():
                readable = readable and isinstance(entry[key], kind)
            for key, keys in PARTS.items():
                readable = readable and all(keys <= part.keys() for part in entry[key])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            readable = False
        if not readable:
            raise RlhfError(
                f"entry {number} of the history of {name} cannot be read; nothing is decided on it: restore MLflow's "
                "database from a backup"
            )
        entries.append(entry)
    return entries


REQUEST, APPROVE, DECLINE, WITHDRAW = "request approval", "approve", "decline", "withdraw request"
RETENTION = "gc"  # deletes versions that no decision is about
ANSWERS = {
    APPROVE: "was approved {by}; `rlhf rollback --reason TEXT` takes a champion back",
    DECLINE: "was declined {by}; `rlhf promote --force --reason TEXT` asks for approval again",
    WITHDRAW: "was judged again {by} and did not pass: {reason}",
}


@dataclass(frozen=True)
class ApprovalRequest:
    """A version that waits, or waited, for approval.

    It can be decided as long as no other decision follows it in the history: whoever decides then
    decides on the champion and the challenger that it was judged by.

    Attributes:
        entry: The request in the history; its ``decision`` is the promotion that is to be approved.
        followed_by: The first decision in the history after it, None while the request is open.
    """

    entry: Entry
    followed_by: Entry | None = None

    @property
    def challenger(self) -> str:
        """The version that waits."""
        return str(self.entry["decision"]["challenger"])

    @property
    def champion(self) -> str | None:
        """The version that it was judged against, None if there was none."""
        champion = self.entry["decision"]["champion"]
        return None if champion is None else str(champion)

    @property
    def is_open(self) -> bool:
        """Whether it can still be decided."""
        return self.followed_by is None

    def closed_because(self) -> str:
        """Why it can no longer be decided, in one line."""
        assert self.followed_by is not None
        entry, model = self.followed_by, self.entry["model"]
        version = f"version {self.challenger} of {model}"
        by = f"by {entry['who'] or 'unknown'} at {utc_minute(entry['time'])}"
        if answer := ANSWERS.get(entry["action"]):
            return f"{version} {answer.format(by=by, reason=entry['reason'])}"
        champion = f"version {self.champion} as champion" if self.champion else "no champion"
        moves = []
        for move in entry["moves"]:
            if move["model"] == model:
                moves.append(f"@{move['alias']} to {version_words(move['version'])}")
        return (
            f"{version} was judged with {champion}, and `{entry['action']}` {by} has moved {', '.join(moves)} since; "
            "`rlhf promote` judges the challenger"
        )


DONE_TAG = "rlhf.decisions_done"
MOST_DIGITS = 12


@dataclass(frozen=True)
class ReleaseState:
    """A registered model and the decisions on it, by one reading of its registry.

    Under its lock (:func:`flows.registry.decisions.registry_session`) decisions are made on it;
    what is committed holds only if the registry is still so.

    Attributes:
        workspace: Whose settings count.
        model: None if the registry does not know it.
        entries: Its history, oldest first.
    """

    workspace: Path
    client: MlflowClient
    name: str
    model: RegisteredModel | None
    entries: Sequence[Entry]

    @classmethod
    def of(cls, workspace: Path, name: str = "") -> ReleaseState:
        """Read the registered policy of a workspace, or another registered model."""
        name = name or load_section(workspace, "registry", RegistryConfig).policy
        return cls.read(connect(workspace), workspace, name)

    @classmethod
    def read(cls, client: MlflowClient, workspace: Path, name: str) -> ReleaseState:
        """Read it; ``RlhfError`` if an entry of the history is missing or unreadable."""
        model = registered_model(client, name)
        entries = [] if model is None else read_history(client, name, model)
        return cls(workspace, client, name, model, entries)

    @cached_property
    def config(self) -> RegistryConfig:
        """The section ``registry`` of the workspace's settings."""
        return load_section(self.workspace, "registry", RegistryConfig)

    @property
    def aliases(self) -> dict[str, str]:
        """Version numbers by alias."""
        return aliases_of(self.model)

    @property
    def champion(self) -> str | None:
        """The version that is champion now."""
        return self.aliases.get(CHAMPION)

    @property
    def crownings(self) -> list[tuple[Entry, str]]:
        """The entries that made a version champion, each with that version, oldest first."""
        crownings = []
        for entry in self.entries:
            for move in entry["moves"]:
                if (move["model"], move["alias"]) == (self.name, CHAMPION):
                    crownings.append((entry, str(move["version"])))
        return crownings

    @property
    def recorded_champion(self) -> str | None:
        """The champion by the history; another one is, if something else than rlhf moved it."""
        return self.crownings[-1][1] if self.crownings else None

    @property
    def champions(self) -> list[str]:
        """Those that have been champion and were not rolled back, the present one last.

        A version that was deleted in MLflow is not among them: nothing goes back to it.
        """
        lists: list[list[str]] = [entry["history"] for entry in self.entries if entry["history"]]
        recorded: list[str] = []
        if lists:
            existing = version_numbers(self.client, self.name)
            recorded = [number for number in lists[-1] if number in existing]
        if self.champion is None:
            return recorded
        return [*(number for number in recorded if number != self.champion), self.champion]

    @property
    def request(self) -> ApprovalRequest | None:
        """The newest request for approval, None if there was never one."""
        followed_by: Entry | None = None
        for entry in reversed(self.entries):
            if entry["action"] == REQUEST:
                return ApprovalRequest(entry, followed_by)
            if entry["action"] != RETENTION:
                followed_by = entry
        return None

    @property
    def waiting(self) -> str:
        """The version that waits for approval, empty if none does."""
        return self.request.challenger if self.request is not None and self.request.is_open else ""

    def open_request(self, version: str | None = None) -> ApprovalRequest:
        """Return the request that waits for approval.

        Args:
            version: The version that the person has looked at, None for the one that waits.

        Raises:
            RlhfError: No version waits, another one does, or the registry has changed since it was
                judged.
        """
        request = self.request
        if request is None:
            raise RlhfError(
                f"no version of {self.name} waits for approval: with registry.approval, `rlhf promote` requests it "
                "for a challenger that passes"
            )
        if version not in (None, request.challenger):
            waiting = f"version {request.challenger} does" if request.is_open else "none does"
            raise RlhfError(
                f"version {version} of {self.name} does not wait for approval; {waiting}"
            )
        if not request.is_open:
            raise RlhfError(request.closed_because())
        for alias, judged in ((CHALLENGER, request.challenger), (CHAMPION, request.champion)):
            now = self.aliases.get(alias)
            if now != judged:  # moved by something else than rlhf
                raise RlhfError(
                    f"the {alias} of {self.name} is {version_words(now)}, and was {version_words(judged)} when version "
                    f"{request.challenger} was judged; `rlhf promote` judges the challenger"
                )
        return request

    @property
    def unfinished(self) -> Sequence[Entry]:
        """The decisions that were not carried out to their end."""
        done = "0" if self.model is None else self.model.tags.get(DONE_TAG, "0")
        # Whoever can write to the registry may have written anything there.
        is_number = done.isascii() and done.isdecimal() and len(done) < MOST_DIGITS
        return self.entries[int(done) if is_number else 0 :]

    @property
    def removed_champion(self) -> str:
        """Why no challenger takes the champion's free place; empty if it may, or there is one."""
        if self.champion is not None or self.recorded_champion is None:
            return ""
        remedy = "--force --reason TEXT` promotes without a match"
        if self.champions:
            last = self.champions[-1]
            remedy = f"--version {last} --force --reason TEXT` restores version {last}"
        return (
            f"version {self.recorded_champion} was champion, and @{CHAMPION} was removed by something else than rlhf, "
            f"so there is nothing to compare with; `rlhf promote {remedy}"
        )

    @property
    def other_owner(self) -> str:
        """The folder of another workspace that owns the model; empty if none does."""
        tag = "" if self.model is None else tag_line(self.model.tags, OWNER_TAG)
        owner, _, folder = tag.partition(" ")
        return "" if owner in ("", workspace_id(self.workspace)) else folder or owner

    @property
    def not_the_owner(self) -> str:
        """Why the workspace may not decide on the champion; empty if it may."""
        if not (folder := self.other_owner):
            return ""
        return (
            f"{self.name} is owned by {folder}: promote there, or set another name in registry.policy; if that folder "
            f"is gone, delete the tag {OWNER_TAG} of {self.name} in MLflow, and the next promotion makes its workspace "
            "the owner"
        )

    def version(self, number: str) -> ModelVersion:
        """Version ``number``; ``RlhfError`` if there is none or the registry does not answer."""
        return get_version(self.client, self.name, number)

    def version_with(self, alias: str) -> ModelVersion | None:
        """The version that has ``alias``, None if none has it."""
        number = self.aliases.get(alias)
        return None if number is None else self.version(number)


def version_words(number: str | None) -> str:
    """Name a version in a sentence."""
    return "none" if number is None else f"version {number}"


def utc_minute(moment: str) -> str:
    """Write an ISO time in UTC to the minute."""
    return f"{moment[:16].replace('T', ' ')} UTC"
