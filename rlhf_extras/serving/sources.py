"""Where the served policy comes from: a folder, or a registry whose alias may move."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import ValidationError

from flows.registry.client import (
    CHAMPION,
    connect,
    get_version,
    knock,
    read_aliases,
    registry_errors,
    versions,
)
from flows.registry.stored_models import stored_sampling, verified_folder
from rlhf_core.config.loading import load_section
from rlhf_core.config.model import SamplingConfig
from rlhf_core.config.operations import RegistryConfig
from rlhf_core.errors import DataError, RlhfError
from rlhf_core.serving.policy_source import PolicyFiles, PolicyRevision
from rlhf_core.storage.files import read_json
from rlhf_core.tracking.pipeline_run import PARENT_TAG
from rlhf_core.tracking.stage_run import tracking_uri

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

GENERATION_CONFIG = "generation_config.json"


class PolicySource(Protocol):
    """Says which revision is to be served."""

    def latest(self) -> PolicyRevision:
        """Return the revision to serve now; raise ``RlhfError`` where that is unknown."""

    def files(self, revision: PolicyRevision) -> PolicyFiles:
        """Return the verified files of ``revision``; ``RlhfError`` if missing or changed."""


@dataclass(frozen=True)
class FolderSource:
    """A model folder. It is read once, so a change in it is served only by another server."""

    folder: Path
    sampling: SamplingConfig

    def latest(self) -> PolicyRevision:
        """Return the folder's own name."""
        return PolicyRevision(self.folder.resolve().name)

    def files(self, _: PolicyRevision) -> PolicyFiles:
        """Return the folder."""
        return PolicyFiles(self.folder, self.sampling)


def sampling_of_folder(folder: Path, default: SamplingConfig) -> SamplingConfig:
    """Return ``default`` with the settings that ``generation_config.json`` of ``folder`` names."""
    file = folder / GENERATION_CONFIG
    stored: Any = read_json(file) if file.is_file() else {}
    if not isinstance(stored, dict):
        raise DataError(f"{file} holds no JSON object; correct it, or take it out")
    given = {name: stored.get(name) for name in SamplingConfig.model_fields}
    settings = {name: value for name, value in given.items() if value is not None}
    try:
        return SamplingConfig.model_validate({**default.model_dump(), **settings})
    except ValidationError as error:
        name = ".".join(map(str, error.errors()[0]["loc"]))
        raise DataError(
            f"{file}: {name} is {settings.get(name)!r}; correct it or take it out"
        ) from error


class RegisteredPolicy:
    """A version of the registered policy: one by its number, or whichever has an alias now."""

    def __init__(
        self, workspace: Path, *, number: str | None = None, alias: str = CHAMPION
    ) -> None:
        self.workspace, self.number, self.alias = workspace, number, alias
        self.name = load_section(workspace, "registry", RegistryConfig).policy
        self.client = connect(workspace)

    def latest(self) -> PolicyRevision:
        """Return the version of that number, or the one that has the alias now.

        Raises:
            RlhfError: No version has it, or the registry does not answer.
        """
        if self.number is not None:
            return PolicyRevision(f"{self.name}:{self.number}")
        uri = tracking_uri(self.workspace)
        with registry_errors(self.client, f"look up {self.name}"):
            if uri.startswith(("http://", "https://")):
                knock(uri)  # MLflow itself would try for minutes
        number = read_aliases(self.client, self.name).get(self.alias)
        if number is None:
            raise RlhfError(
                f"no version of {self.name} has the alias {self.alias}; `rlhf status` shows what there is"
            )
        return PolicyRevision(f"{self.name}:{number}", f"{self.name}@{self.alias}")

    def files(self, revision: PolicyRevision) -> PolicyFiles:
        """Return the verified folder of a version, and the sampling it was judged with.

        Raises:
            RlhfError: There is no such version, or its files are not the registered ones.
        """
        number = revision.id.rpartition(":")[2]
        folder = verified_folder(self.workspace, get_version(self.client, self.name, number))
        return PolicyFiles(folder, SamplingConfig(**stored_sampling(folder)))


def version_of_run(client: MlflowClient, name: str, run_id: str) -> ModelVersion:
    """Return the newest version of ``name`` that an MLflow run, or one below it, registered.

    Raises:
        RlhfError: There is no such run, or it registered none.
    """
    from mlflow.exceptions import MlflowException

    try:
        experiment = client.get_run(run_id).info.experiment_id
    except MlflowException as error:
        raise RlhfError(
            f"MLflow has no run {run_id}; the pipeline's page shows the ids of its runs"
        ) from error
    with registry_errors(client, f"look up the runs of {run_id}"):
        children = client.search_runs(
            [experiment], filter_string=f"tags.`{PARENT_TAG}` = '{run_id}'"
        )
    family = {run_id, *(child.info.run_id for child in children)}
    registered = [version for version in versions(client, name) if version.run_id in family]
    if not registered:
        raise RlhfError(
            f"run {run_id} registered no version of {name}; `rlhf history` shows what was registered"
        )
    return registered[0]
