"""The model that an alias points to, as a folder whose files are the registered ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from flows.registry.governance.lock import registry_lock
from flows.registry.mlflow_client import connect
from flows.registry.transactions.alias_transaction import finish_interrupted, pending
from flows.registry.transactions.aliases import CHALLENGER, CHAMPION, get_version, read_aliases
from flows.registry.versions.model_artifacts import verified_folder
from rlhf_core.config.loading.load import load_section
from rlhf_core.config.operations.operations import RegistryConfig
from rlhf_core.errors import RlhfError

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion


def champion_folder(workspace: Path, alias: str = CHAMPION) -> Path:
    """The Hugging Face folder of the policy with ``alias``, its content verified.

    A promotion that was interrupted is completed first. Raises ``RlhfError`` where no version has the alias and
    ``ModelError`` where its files are not the registered ones.
    """
    return verified_folder(workspace.resolve(), policy_with_alias(workspace, alias))


def policy_with_alias(workspace: Path, alias: str = CHAMPION) -> ModelVersion:
    """The version of the policy that ``alias`` points to, after an interrupted promotion was completed.

    Raises:
        RlhfError: No version has the alias.
    """
    workspace = workspace.resolve()
    config = load_section(workspace, "registry", RegistryConfig)
    client = connect(workspace)
    if pending(client, config) is not None:  # else a match of another workspace need not be waited for
        with registry_lock(workspace, config.policy):
            finish_interrupted(client, workspace, config)
    aliases = read_aliases(client, config.policy)
    if alias in aliases:
        return get_version(client, config.policy, aliases[alias])
    if alias in (CHAMPION, CHALLENGER):
        remedy = "in this workspace yet; `rlhf run` makes one, `rlhf status` shows what is"
    else:
        remedy = f"in this workspace; its aliases are {', '.join(sorted(aliases)) or 'none'}"
    raise RlhfError(f"no {alias} of {config.policy} {remedy}")
