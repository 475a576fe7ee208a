"""The history of a registered model: every change of its aliases and terms, chained by hashes.

A chain without its last entries is a chain too, so a tag of the registered model says where the history ended when it
was last written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flows.registry.governance.ledger import Ledger
from rlhf_core.errors import RlhfError

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import RegisteredModel

KIND = "history"
HEAD_TAG = "rlhf.history_head"


def history_ledger(client: MlflowClient, name: str, model: RegisteredModel | None = None) -> Ledger:
    """The ledger that holds the history of the registered model ``name``, which may have been looked up before."""
    return Ledger.open(client, name, KIND, model)


def chain_hash(entry: str) -> str:
    """The hash by which the next entry names this one."""
    return hashlib.sha256(entry.encode()).hexdigest()


def head_of(entries: Sequence[str]) -> str:
    """The value of ``HEAD_TAG``: how many entries there are, and the hash of the last."""
    return f"{len(entries)} {chain_hash(entries[-1])}"


def checked_history(name: str, entries: Sequence[str], model: RegisteredModel | None = None) -> list[dict[str, Any]]:
    """Read the entries of a history, oldest first, and compare the hash that each names with the entry before it.

    Args:
        model: The registered model, looked up before ``entries`` were read: they must reach to where its tag says that
            the history ended.

    Raises:
        RlhfError: An entry is no record of ``name``, is not the one that followed, or is gone: somebody has changed
            MLflow's database.
    """
    records: list[dict[str, Any]] = []
    previous = ""
    for number, text in enumerate(entries, start=1):
        try:
            record = json.loads(text)
            intact = (record["number"], record["previous"], record["model"]) == (number, previous, name)
        except (ValueError, KeyError, TypeError):
            intact = False
        if not intact:
            raise RlhfError(
                f"the history of {name} was changed: entry {number} does not follow from the one before it; restore "
                "MLflow's database from a backup"
            )
        records.append(record)
        previous = chain_hash(text)
    head = None if model is None else model.tags.get(HEAD_TAG)
    if head is not None and not _reaches(entries, head):
        raise RlhfError(
            f"the history of {name} was changed: it had {head.partition(' ')[0]} entries, and ends otherwise now; "
            "restore MLflow's database from a backup"
        )
    return records


def _reaches(entries: Sequence[str], head: str) -> bool:
    """Whether the history had the end ``head`` at some time."""
    count = head.partition(" ")[0]
    return count.isdecimal() and 1 <= int(count) <= len(entries) and head_of(entries[: int(count)]) == head
