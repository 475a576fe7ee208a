"""Which policy ``rlhf chat`` and ``rlhf serve`` answer with, and what it was trained on."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from flows.registry.client import CHAMPION, connect, get_version
from flows.registry.evidence import TrainingSource, source_of_version, source_of_workspace
from flows.registry.promote import promotion_obstacle
from flows.registry.stored_models import (
    describe_stopped_policy,
    policy_with_alias,
)
from flows.workspace import display_path, find_workspace, is_workspace, model_folder
from rlhf_core.config.evaluation import EvaluateConfig
from rlhf_core.config.loading import load_section
from rlhf_core.config.model import SamplingConfig
from rlhf_core.config.operations import RegistryConfig
from rlhf_core.errors import ConfigError
from rlhf_core.gates import closed_gate
from rlhf_extras.serving.sources import (
    FolderSource,
    PolicySource,
    RegisteredPolicy,
    sampling_of_folder,
    version_of_run,
)

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion


TOY = "This is a toy: its world has lamps, boats and frogs. It knows nothing of people."


def about_version(
    workspace: Path, version: ModelVersion, alias: str | None = None
) -> tuple[str, ...]:
    """Return lines that say which version of the policy it is and what it was trained on."""
    registered = datetime.fromtimestamp(version.creation_timestamp / 1000)
    called = f" (@{alias})" if alias else ""
    name = (
        f"{version.name} version {version.version}{called}, registered {registered:%Y-%m-%d %H:%M}"
    )
    return (name, *_training(source_of_version(connect(workspace), version)))


def about_folder(folder: Path) -> tuple[str, ...]:
    """Return lines that say which model lies in ``folder``, and what it was trained on if known."""
    config, own = folder / "config.json", _workspace_of(folder)
    written = (
        f", written {datetime.fromtimestamp(config.stat().st_mtime):%Y-%m-%d %H:%M}"
        if config.is_file()
        else ""
    )
    lines: tuple[str, ...] = (f"the model in {display_path(folder)}{written}",)
    if own is not None:
        is_policy = folder.resolve() == own / "models" / "policy"
        lines += _training(
            source_of_workspace(own), "trained on" if is_policy else "from a pipeline on"
        )
        if stopped := not_released(folder):
            lines += (stopped,)
    return lines


def not_released(folder: Path) -> str:
    """Say that the policy in ``folder`` was stopped by its gate; empty for any other model."""
    own = _workspace_of(folder)
    if own is None or folder.resolve() != own / "models" / "policy":
        return ""
    closed = closed_gate(own)
    if closed is None or closed.name != "policy" or closed.changed_evidence(own):
        return ""
    return f"not released: {closed.describe()}; `rlhf gate policy --explain` names them"


def _workspace_of(folder: Path) -> Path | None:
    return next((parent for parent in folder.resolve().parents if is_workspace(parent)), None)


def _training(source: TrainingSource | None, verb: str = "trained on") -> tuple[str, ...]:
    if source is None:
        return ()
    return (f"{verb} {source}", *([TOY] if source.is_synthetic else []))


@dataclass(frozen=True)
class ServedSource:
    """The source of a policy to serve or to talk to, and lines that say what it is.

    ``moves`` if another revision may be served later.

    ``workspace`` is the one that the policy comes from, None for a folder outside of any.
    """

    source: PolicySource
    about: tuple[str, ...]
    workspace: Path | None
    moves: bool = False


def served_source(
    workspace: Path | None,
    model: Path | None = None,
    alias: str | None = None,
    version: str | None = None,
    run: str | None = None,
) -> ServedSource:
    """Return the source of the policy that at most one argument names; by default the champion's.

    Args:
        model: A model folder.
        alias: The version that this alias points to, whenever it moves.
        version: One version of the registered policy.
        run: The version that this MLflow run registered.

    Raises:
        RlhfError: There is no such folder, alias, version or run, or several are named.
    """
    if sum(value is not None for value in (model, alias, version, run)) > 1:
        raise ConfigError(
            "--model, --alias, --version and --run each name a policy; give one of them"
        )
    if model is not None:
        model = model_folder(model, workspace)
        own = find_workspace(workspace) if workspace else _workspace_of(model)
        judged = load_section(own, "evaluate", EvaluateConfig).sampling if own else None
        sampling = judged or sampling_of_folder(model, SamplingConfig())
        return ServedSource(FolderSource(model, sampling), about_folder(model), own)
    folder = find_workspace(workspace)
    if version is None and run is None:
        alias = alias or CHAMPION
        about = about_version(folder, policy_with_alias(folder, alias), alias)
        if stopped := describe_stopped_policy(folder):
            about = (*about, f"not the newest policy: {stopped}")
        return ServedSource(RegisteredPolicy(folder, alias=alias), about, folder, moves=True)
    name, client = load_section(folder, "registry", RegistryConfig).policy, connect(folder)
    found = (
        get_version(client, name, version)
        if version is not None
        else version_of_run(client, name, run or "")
    )
    about = about_version(folder, found)
    if obstacle := promotion_obstacle(found):
        about = (*about, f"it could not be promoted: {obstacle}")
    return ServedSource(RegisteredPolicy(folder, number=str(found.version)), about, folder)
