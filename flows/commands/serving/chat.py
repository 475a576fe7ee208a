"""Who answers in ``rlhf chat``: the champion or a model folder, and what it was trained on."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from flows.registry.aliases import CHAMPION
from flows.registry.client import connect
from flows.registry.evidence import TrainingSource, source_of_version, source_of_workspace
from flows.registry.stored_models import policy_with_alias, verified_folder
from flows.workspace.folder import display_path, is_workspace

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

TOY = "This is a toy: its world has lamps, boats and frogs. It knows nothing of people."


@dataclass(frozen=True)
class ChatModel:
    """A model to talk to.

    Attributes:
        workspace: The workspace that it comes from, None for a folder outside of any.
        about: Lines that say which model it is and what it was trained on.
    """

    folder: Path
    workspace: Path | None
    about: tuple[str, ...]


def champion_model(workspace: Path) -> ChatModel:
    """Return the champion of ``workspace``, its files verified.

    Raises:
        RlhfError: There is no champion, or its files are not the registered ones.
    """
    workspace = workspace.resolve()
    version = policy_with_alias(workspace)
    return ChatModel(verified_folder(workspace, version), workspace, about_version(workspace, version, CHAMPION))


def about_version(workspace: Path, version: ModelVersion, alias: str | None = None) -> tuple[str, ...]:
    """Return lines that say which version of the policy it is and what it was trained on."""
    registered = datetime.fromtimestamp(version.creation_timestamp / 1000)
    called = f" (@{alias})" if alias else ""
    name = f"{version.name} version {version.version}{called}, registered {registered:%Y-%m-%d %H:%M}"
    return (name, *_training(source_of_version(connect(workspace), version)))


def folder_model(folder: Path, workspace: Path | None) -> ChatModel:
    """Return the model of ``folder``, which need not exist; its workspace is the one it lies in, else ``workspace``."""
    own = next((parent for parent in folder.resolve().parents if is_workspace(parent)), None)
    config = folder / "config.json"
    written = f", written {datetime.fromtimestamp(config.stat().st_mtime):%Y-%m-%d %H:%M}" if config.is_file() else ""
    training: tuple[str, ...] = ()
    if own is not None:
        is_policy = folder.resolve() == own / "models" / "policy"
        training = _training(source_of_workspace(own), "trained on" if is_policy else "from a pipeline on")
    return ChatModel(folder, own or workspace, (f"the model in {display_path(folder)}{written}", *training))


def _training(source: TrainingSource | None, verb: str = "trained on") -> tuple[str, ...]:
    if source is None:
        return ()
    return (f"{verb} {source}", *([TOY] if source.is_synthetic else []))
