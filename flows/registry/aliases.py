"""Aliases and versions of registered models, read so that a failed request is never mistaken for
"there is none".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rlhf_core.errors import RlhfError, is_full_disk, named_line

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion, RegisteredModel


CHALLENGER, CHAMPION, PREVIOUS = "challenger", "champion", "previous"
# Tags of versions: the hash of their files, the reward model behind a policy, and what gates said.
CONTENT_TAG, REWARD_VERSION_TAG = "content_sha256", "reward_model_version"
GATES_TAG, UNGATED_TAG, GATE_REPORT_TAG, CONDITIONS_TAG = (
    "gates",
    "ungated",
    "gate",
    "gate_conditions",
)
# The tags that promotion relies on, and which are therefore signed.
SIGNED_TAGS = (GATES_TAG, GATE_REPORT_TAG, CONDITIONS_TAG, UNGATED_TAG, REWARD_VERSION_TAG)
UNKNOWN = "RESOURCE_DOES_NOT_EXIST"


@contextmanager
def registry_errors(action: str) -> Iterator[None]:
    """Turn an error of MLflow in the block into a one-line ``RlhfError`` that names ``action``."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (
        MlflowException,
        SQLAlchemyError,
        OSError,
    ) as error:  # MLflow does not wrap all errors of its database
        raise RlhfError(
            f"the model registry could not {action} {reason_and_remedy(error)}"
        ) from error


def reason_and_remedy(error: Exception) -> str:
    """What MLflow, its database or a disk said, in brackets, and what to do about it."""
    remedy = (
        "make room and run the command again"
        if is_full_disk(error)
        else "try again when it answers"
    )
    return f"({named_line(error)}); {remedy}"


def registered_model(client: MlflowClient, name: str) -> RegisteredModel | None:
    """The registered model ``name``, or None if the registry knows no such model; ``RlhfError`` for
    any other error.
    """
    from mlflow.exceptions import MlflowException

    with registry_errors(f"look up {name}"):
        try:
            return client.get_registered_model(name)
        except MlflowException as error:
            if error.error_code == UNKNOWN:
                return None
            raise


def read_aliases(client: MlflowClient, name: str) -> dict[str, str]:
    """Version numbers by alias; empty for an unknown model. ``RlhfError`` when the registry does
    not answer.
    """
    return aliases_of(registered_model(client, name))


def aliases_of(model: RegisteredModel | None) -> dict[str, str]:
    """Version numbers by alias of a registered model that has been looked up; empty for an unknown
    one.
    """
    return (
        {} if model is None else {alias: str(version) for alias, version in model.aliases.items()}
    )


def get_version(client: MlflowClient, name: str, number: str) -> ModelVersion:
    """Version ``number`` of a registered model; ``RlhfError`` if there is none or the registry does
    not answer.
    """
    from mlflow.exceptions import MlflowException

    with registry_errors(f"look up {name} version {number}"):
        try:
            return client.get_model_version(name, number)
        except MlflowException as error:
            if error.error_code == UNKNOWN or not str(number).isdecimal():
                raise RlhfError(
                    f"{name} has no version {number}; `rlhf status` shows what there is"
                ) from error
            raise


def versions(client: MlflowClient, name: str) -> list[ModelVersion]:
    """All versions of a registered model, newest first; none when the model is unknown."""
    listed: list[ModelVersion] = []
    token: str | None = None
    while True:
        with registry_errors(f"list the versions of {name}"):
            page = client.search_model_versions(f"name='{name}'", max_results=200, page_token=token)
        listed += list(page)
        token = page.token
        if not token:
            return sorted(listed, key=lambda version: int(version.version), reverse=True)


def version_numbers(client: MlflowClient, name: str) -> set[str]:
    """The numbers of the versions that a registered model has now; MLflow lets anyone delete
    one.
    """
    return {str(version.version) for version in versions(client, name)}
