"""A decision about the registered policy of a workspace: under its lock, on what the registry holds then."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.registry.governance.lock import registry_lock
from flows.registry.mlflow_client import prepare_tracking
from flows.registry.transactions.alias_transaction import AliasTransaction, commit, finish_interrupted
from flows.registry.transactions.aliases import aliases_of, get_version
from rlhf_core.config.loading.load import load_section
from rlhf_core.config.operations.operations import RegistryConfig

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion, RegisteredModel

RETRIES = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"


@dataclass(frozen=True)
class RegistrySession:
    """The registered policy as it was read under its lock; what is committed holds only if it is still so.

    Attributes:
        model: The registered policy, None if the registry does not know it.
        records: Its history, oldest entry first.
    """

    workspace: Path
    config: RegistryConfig
    client: MlflowClient
    model: RegisteredModel | None
    records: Sequence[Mapping[str, Any]]

    @property
    def aliases(self) -> dict[str, str]:
        """Version numbers by alias."""
        return aliases_of(self.model)

    def version_with(self, alias: str) -> ModelVersion | None:
        """The version that has ``alias``, None if none has it."""
        number = self.aliases.get(alias)
        return None if number is None else get_version(self.client, self.config.policy, number)

    def commit(self, transaction: AliasTransaction) -> Path | None:
        """Record the transaction and carry it out (:func:`flows.registry.transactions.alias_transaction.commit`)."""
        return commit(self.client, self.workspace, transaction, self.records, self.model)


@contextmanager
def _retries_for_a_minute() -> Iterator[None]:
    """Where the user does not say otherwise: MLflow's client would retry for four minutes before it gives up."""
    if RETRIES in os.environ:
        yield
        return
    os.environ[RETRIES] = "5"  # after 4, 8, 16 and 32 seconds
    try:
        yield
    finally:
        os.environ.pop(RETRIES, None)


@contextmanager
def registry_session(workspace: Path) -> Iterator[RegistrySession]:
    """Lock the registered policy of ``workspace`` for the block, after completing what an earlier call began.

    Raises:
        RlhfError: The registry does not answer, or the history of the policy cannot be read.
    """
    workspace = workspace.resolve()
    config = load_section(workspace, "registry", RegistryConfig)
    client = prepare_tracking(workspace)
    with registry_lock(workspace, config.policy), _retries_for_a_minute():
        model, records = finish_interrupted(client, workspace, config)
        yield RegistrySession(workspace, config, client, model, records)
