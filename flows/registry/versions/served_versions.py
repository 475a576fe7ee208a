"""Registered policies as what a server serves: the version that an alias points to now, or one version for good."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from flows.registry.evidence.training_source import PARENT_TAG
from flows.registry.mlflow_client import connect, knock, tracking_uri
from flows.registry.transactions.aliases import get_version, read_aliases, registry_errors, versions
from flows.registry.versions.model_artifacts import stored_sampling, verified_folder
from rlhf_core.config.loading.load import load_section
from rlhf_core.config.model import SamplingConfig
from rlhf_core.config.operations.operations import RegistryConfig
from rlhf_core.errors import RlhfError
from rlhf_core.serving.policy_source import PolicyFiles, PolicyRevision

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion


class VersionSource:
    """One version of the registered policy of a workspace."""

    def __init__(self, workspace: Path, number: str) -> None:
        self.workspace, self.number = workspace, number
        self.name = load_section(workspace, "registry", RegistryConfig).policy
        self.client = connect(workspace)

    def latest(self) -> PolicyRevision:
        """Return the version."""
        return PolicyRevision(f"{self.name}:{self.number}")

    def files(self, revision: PolicyRevision) -> PolicyFiles:
        """Return the folder of a version, its content verified, and the sampling it was judged with.

        Raises:
            RlhfError: There is no such version, or its files are not the registered ones.
        """
        number = revision.id.rpartition(":")[2]
        folder = verified_folder(self.workspace, get_version(self.client, self.name, number))
        return PolicyFiles(folder, SamplingConfig(**stored_sampling(folder)))


class AliasSource(VersionSource):
    """The version that an alias points to whenever it is asked."""

    def __init__(self, workspace: Path, alias: str) -> None:
        super().__init__(workspace, "")
        self.alias = alias

    def latest(self) -> PolicyRevision:
        """Return the version that has the alias now.

        Raises:
            RlhfError: No version has it, or the registry does not answer.
        """
        uri = tracking_uri(self.workspace)
        with registry_errors(f"look up {self.name}"):
            if uri.startswith(("http://", "https://")):
                knock(uri)  # MLflow itself would try for minutes
        number = read_aliases(self.client, self.name).get(self.alias)
        if number is None:
            raise RlhfError(f"no version of {self.name} has the alias {self.alias}; `rlhf status` shows what there is")
        return PolicyRevision(f"{self.name}:{number}", f"{self.name}@{self.alias}")


def version_of_run(client: MlflowClient, name: str, run_id: str) -> ModelVersion:
    """Return the newest version of ``name`` that the MLflow run ``run_id``, or a run below it, registered.

    Raises:
        RlhfError: There is no such run, or it registered none.
    """
    from mlflow.exceptions import MlflowException

    try:
        experiment = client.get_run(run_id).info.experiment_id
    except MlflowException as error:
        raise RlhfError(f"MLflow has no run {run_id}; the pipeline's page shows the ids of its runs") from error
    with registry_errors(f"look up the runs of {run_id}"):
        children = client.search_runs([experiment], filter_string=f"tags.`{PARENT_TAG}` = '{run_id}'")
    family = {run_id, *(child.info.run_id for child in children)}
    registered = [version for version in versions(client, name) if version.run_id in family]
    if not registered:
        raise RlhfError(f"run {run_id} registered no version of {name}; `rlhf history` shows what was registered")
    return registered[0]
