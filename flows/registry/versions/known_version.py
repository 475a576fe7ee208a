"""The version that a model folder was registered as before, if the store still has its files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from flows.registry.mlflow_client import fluent
from flows.registry.transactions.aliases import registry_errors
from flows.registry.versions.model_artifacts import COMPLETE_TAG, CONTENT_TAG
from rlhf_core.storage.files import sha256_tree

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.store.artifact.artifact_repo import ArtifactRepository


def known_version(
    client: MlflowClient, workspace: Path, listed: Sequence[ModelVersion], folder: Path, content: str
) -> ModelVersion | None:
    """The newest of ``listed`` that holds ``folder``, None if none does.

    A version counts if its creation was not interrupted (it has the tag "complete") and its files have not been changed
    or deleted since: else nobody could use it, and the folder has to be registered again.

    Args:
        listed: The versions of a registered model, newest first.
        content: SHA-256 of ``folder``.

    Raises:
        RlhfError: The registry does not answer.
    """
    for version in listed:
        if version.tags.get(CONTENT_TAG) == content and version.tags.get(COMPLETE_TAG) == "true":
            with registry_errors(f"look for the files of {version.name} version {version.version}"):
                if _has_files(client, workspace, version, folder):
                    return version
    return None


def _has_files(client: MlflowClient, workspace: Path, version: ModelVersion, folder: Path) -> bool:
    """Whether the store has the files of ``folder`` for a version: local ones by their content, those of a server by
    their names and sizes, without a download.
    """
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
    from mlflow.utils.file_utils import local_file_uri_to_path

    uri = str(client.get_model_version_download_uri(version.name, str(version.version)))
    if uri.startswith(("file:", "/")):
        configs = sorted((Path(local_file_uri_to_path(uri)) / "artifacts").glob("*/config.json"))
        return bool(configs) and sha256_tree(configs[0].parent) == version.tags[CONTENT_TAG]
    expected = {
        file.relative_to(folder).as_posix(): file.stat().st_size for file in folder.rglob("*") if file.is_file()
    }
    with fluent(workspace):
        store = get_artifact_repository(uri)
        stored = [_sizes(store, entry.path, entry.path) for entry in store.list_artifacts("artifacts") if entry.is_dir]
    return stored == [expected]


def _sizes(store: ArtifactRepository, folder: str, root: str) -> dict[str, int | None]:
    """Bytes of each file below ``folder`` of the store, by its path from ``root``."""
    sizes: dict[str, int | None] = {}
    for entry in store.list_artifacts(folder):
        if entry.is_dir:
            sizes |= _sizes(store, entry.path, root)
        else:
            sizes[PurePosixPath(entry.path).relative_to(root).as_posix()] = entry.file_size
    return sizes
