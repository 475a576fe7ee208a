"""What was decided on a registered model, in entries that are written once, and requests for approval among them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flows.registry.aliases import CHALLENGER, CHAMPION, registered_model, registry_errors, versions
from rlhf_core.errors import RlhfError

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import RegisteredModel


LEDGER_TAG = "rlhf.ledger_run"
ENTRY_LIMIT = 5000  # characters; MLflow cuts parameters off at 6000


class EntryTaken(RlhfError):
    """Another process has written the entry of that number; nothing was changed."""


@dataclass(frozen=True)
class Ledger:
    """The entries ``KIND.NAME.1``, ``KIND.NAME.2``, … of the registered model ``name``.

    ``run_id`` is None as long as the model has no version; such a ledger is empty, and nothing can be appended.
    ``tagged`` says whether a tag of the model keeps it: versions may be deleted later.
    """

    client: MlflowClient
    name: str
    kind: str
    run_id: str | None
    tagged: bool

    @classmethod
    def open(cls, client: MlflowClient, name: str, kind: str, model: RegisteredModel | None = None) -> Ledger:
        """Find the ledger of a registered model; ``RlhfError`` if the registry does not answer.

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
        with registry_errors(f"read the {self.kind} of {self.name}"):
            params = self.client.get_run(self.run_id).data.params
        prefix = self._key("")
        own = {key.removeprefix(prefix): text for key, text in params.items() if key.startswith(prefix)}
        numbered = {number: text for number, text in own.items() if number.isdecimal()}
        expected = [str(number) for number in range(1, len(numbered) + 1)]
        missing = sorted(set(expected) - set(numbered), key=int)
        if missing:
            raise RlhfError(
                f"the {self.kind} of {self.name} lacks entry {missing[0]} (run {self.run_id} of MLflow); "
                "nothing is decided on an incomplete record: restore MLflow's database from a backup"
            )
        return [numbered[number] for number in expected]

    def append(self, number: int, text: str) -> None:
        """Write entry ``number``, for good. Writing the same text again changes nothing.

        Raises:
            EntryTaken: The entry exists with another text.
            RlhfError: The registry does not answer, or the text is too long.
        """
        from mlflow.exceptions import MlflowException

        if self.run_id is None:
            raise RlhfError(f"{self.name} has no version yet, so there is nothing to record about it")
        if len(text) > ENTRY_LIMIT:
            raise RlhfError(f"an entry of the {self.kind} of {self.name} is too long: {len(text)} characters")
        with registry_errors(f"record entry {number} in the {self.kind} of {self.name}; nothing has changed"):
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
        name = "".join(character if character.isalnum() or character in "_-. " else "_" for character in self.name)
        return f"{self.kind}.{name[:200]}.{number}"


KIND = "history"


def history_ledger(client: MlflowClient, name: str, model: RegisteredModel | None = None) -> Ledger:
    """The ledger that holds the history of the registered model ``name``, which may have been looked up before."""
    return Ledger.open(client, name, KIND, model)


def read_history(client: MlflowClient, name: str, model: RegisteredModel | None = None) -> list[dict[str, Any]]:
    """The decisions on the registered model ``name``, oldest first.

    Raises:
        RlhfError: The registry does not answer, or an entry is missing or no decision on ``name``.
    """
    records: list[dict[str, Any]] = []
    for number, text in enumerate(history_ledger(client, name, model).entries(), start=1):
        try:
            record = json.loads(text)
            readable = (record["number"], record["model"]) == (number, name)
        except (ValueError, KeyError, TypeError):
            readable = False
        if not readable:
            raise RlhfError(
                f"entry {number} of the history of {name} cannot be read; nothing is decided on it: restore MLflow's "
                "database from a backup"
            )
        records.append(record)
    return records


REQUEST, APPROVE, DECLINE, WITHDRAW = "request approval", "approve", "decline", "withdraw request"
RETENTION = "gc"  # deletes versions that no decision is about


@dataclass(frozen=True)
class ApprovalRequest:
    """A version that waits, or waited, for approval.

    It can be decided as long as no other decision follows it in the history: whoever decides then decides on the
    champion and the challenger that it was judged by.

    Attributes:
        decision: The report of the promotion that is to be approved.
        asked_by: Who, or which job, had it judged.
        followed_by: The first decision in the history after it, None while the request is open.
    """

    model: str
    decision: Mapping[str, Any]
    asked_by: str
    asked_at: str
    followed_by: Mapping[str, Any] | None = None

    @property
    def challenger(self) -> str:
        """The version that waits."""
        return str(self.decision["challenger"])

    @property
    def champion(self) -> str | None:
        """The version that it was judged against, None if there was none."""
        champion = self.decision["champion"]
        return None if champion is None else str(champion)

    @property
    def is_open(self) -> bool:
        """Whether it can still be decided."""
        return self.followed_by is None

    def is_about(self, challenger: str, champion: str | None) -> bool:
        """Whether it is open, and asks to put ``challenger`` in the place of ``champion``."""
        return self.is_open and (self.challenger, self.champion) == (challenger, champion)

    def closed_because(self) -> str:
        """Why it can no longer be decided, in one line."""
        entry = self.followed_by or {}
        version = f"version {self.challenger} of {self.model}"
        by = f"by {entry.get('who') or 'unknown'} at {utc_minute(str(entry.get('time', '')))}"
        moves = {move["alias"]: move["version"] for move in entry.get("moves", ()) if move["model"] == self.model}
        match entry.get("action"):
            case str(action) if action == APPROVE:
                return f"{version} was approved {by}; `rlhf rollback --reason TEXT` takes a champion back"
            case str(action) if action == DECLINE:
                return f"{version} was declined {by}; `rlhf promote --force --reason TEXT` asks for approval again"
            case str(action) if action == WITHDRAW:
                return f"{version} was judged again {by} and did not pass: {entry.get('reason')}"
        if CHAMPION in moves:
            judged = f"judged against version {self.champion}" if self.champion else "judged without a champion"
            return (
                f"version {moves[CHAMPION]} became champion {by}, after {version} was {judged}; `rlhf promote` judges "
                "the challenger against it"
            )
        newer = moves.get(CHALLENGER) or "none"
        since = utc_minute(str(entry.get("time", "")))
        return f"the challenger is version {newer} since {since}, no longer {version}; `rlhf promote` judges it"


def latest_request(model: str, records: Sequence[Mapping[str, Any]]) -> ApprovalRequest | None:
    """The newest request for approval in the history ``records`` of ``model``, None if there was never one."""
    for index in reversed(range(len(records))):
        record = records[index]
        if record["action"] == REQUEST:
            following = [later for later in records[index + 1 :] if later["action"] != RETENTION]
            decided = following[0] if following else None
            return ApprovalRequest(model, record["decision"], record["who"], record["time"], decided)
    return None


def request_to_decide(
    model: str, records: Sequence[Mapping[str, Any]], aliases: Mapping[str, str], version: str | None
) -> ApprovalRequest:
    """The open request for approval of ``model``.

    Args:
        records: The history of ``model``.
        aliases: Its version numbers by alias.
        version: The version that the person has looked at, None for the one that waits.

    Raises:
        RlhfError: No version waits, another one does, or the registry has changed since it was judged.
    """
    request = latest_request(model, records)
    if request is None:
        raise RlhfError(
            f"no version of {model} waits for approval: with registry.approval, `rlhf promote` requests it for a "
            "challenger that passes"
        )
    if version not in (None, request.challenger):
        waiting = f"version {request.challenger} does" if request.is_open else "none does"
        raise RlhfError(f"version {version} of {model} does not wait for approval; {waiting}")
    if not request.is_open:
        raise RlhfError(request.closed_because())
    if aliases.get(CHALLENGER) != request.challenger:  # moved by something else than rlhf
        raise RlhfError(
            f"the challenger of {model} is {version_words(aliases.get(CHALLENGER))}, but version {request.challenger} "
            "was judged; `rlhf promote` judges the challenger"
        )
    if aliases.get(CHAMPION) != request.champion:
        raise RlhfError(
            f"the champion of {model} is {version_words(aliases.get(CHAMPION))}, but version {request.challenger} was "
            f"judged against {version_words(request.champion)}; `rlhf promote` judges it again"
        )
    return request


def version_words(number: str | None) -> str:
    """Name a version in a sentence."""
    return "none" if number is None else f"version {number}"


def utc_minute(moment: str) -> str:
    """Write an ISO time in UTC to the minute."""
    return f"{moment[:16].replace('T', ' ')} UTC"
