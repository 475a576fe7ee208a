"""Requests for approval: a version that passed everything required, waiting in the history for a person's decision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flows.registry.transactions.aliases import CHALLENGER, CHAMPION
from rlhf_core.errors import RlhfError

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
        by = f"by {entry.get('who') or 'unknown'} at {_minute(entry)}"
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
        if CHALLENGER in moves:
            newer = moves[CHALLENGER] or "none"
            since = _minute(entry)
            return f"the challenger is version {newer} since {since}, no longer {version}; `rlhf promote` judges it"
        return f"{self.model} has another owner {by}, after {version} was judged; `rlhf promote` judges it again"


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
            f"the challenger of {model} is {_version(aliases.get(CHALLENGER))}, but {_version(request.challenger)} was "
            "judged; `rlhf promote` judges the challenger"
        )
    if aliases.get(CHAMPION) != request.champion:
        raise RlhfError(
            f"the champion of {model} is {_version(aliases.get(CHAMPION))}, but {_version(request.challenger)} was "
            f"judged against {_version(request.champion)}; `rlhf promote` judges it again"
        )
    return request


def _version(number: str | None) -> str:
    return "none" if number is None else f"version {number}"


def _minute(entry: Mapping[str, Any]) -> str:
    return f"{str(entry.get('time', ''))[:16].replace('T', ' ')} UTC"
