"""The history of a registered model: every change of its aliases and terms, chained by hashes."""

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


def history_ledger(client: MlflowClient, name: str, model: RegisteredModel | None = None) -> Ledger:
    """The ledger that holds the history of the registered model ``name``, which may have been looked up before."""
    return Ledger.open(client, name, KIND, model)


def chain_hash(entry: str) -> str:
    """The hash by which the next entry names this one."""
    return hashlib.sha256(entry.encode()).hexdigest()


def checked_history(name: str, entries: Sequence[str]) -> list[dict[str, Any]]:
    """Read the entries of a history, oldest first, and compare the hash that each names with the entry before it.

    Raises:
        RlhfError: An entry is no record, or is not the one that followed: somebody has changed MLflow's database.
    """
    records: list[dict[str, Any]] = []
    previous = ""
    for number, text in enumerate(entries, start=1):
        try:
            record = json.loads(text)
            intact = record["number"] == number and record["previous"] == previous
        except (ValueError, KeyError, TypeError):
            intact = False
        if not intact:
            raise RlhfError(
                f"the history of {name} was changed: entry {number} does not follow from the one before it; restore "
                "MLflow's database from a backup"
            )
        records.append(record)
        previous = chain_hash(text)
    return records
