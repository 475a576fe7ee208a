"""The history of a registered model: what was decided on it, by whom, when and why, in the order of the decisions.

It is a record, not a proof: whoever may write to MLflow may write another one.
"""

from __future__ import annotations

import json
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
