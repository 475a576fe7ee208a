"""Decisions about the registered policy of a workspace: under its lock, on what the registry holds then, by its owner.

Its first promotion makes a workspace the owner, by a tag of the registered model. Other workspaces may register
versions under the same name; whether one becomes champion is decided by the owner's gates, prompts, judge and bounds.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flows.registry.client import connect, prepare_tracking
from flows.registry.decisions import finish_interrupted
from flows.registry.evidence import gate_conditions
from flows.registry.history import ReleaseState
from flows.registry.workspace import OWNER_TAG, workspace_id
from flows.workspace import locked
from rlhf_core.config.loading import load_section
from rlhf_core.config.operations import RegistryConfig
from rlhf_core.gates import describe_bound
from rlhf_core.tracking.stage_run import default_environment, tracking_uri


@contextmanager
def registry_lock(workspace: Path, model: str) -> Iterator[None]:
    """Hold the lock of the registered model ``model`` for the block; wait for another holder.

    The file lies beside a SQLite database, and for a server in the temporary folder of the user. Processes of other
    machines and users are not locked out: of two that decide at the same time, the second one's entry in the history is
    refused (:meth:`flows.registry.history.Ledger.append`).
    """
    from sqlalchemy.engine import make_url

    uri = tracking_uri(workspace)
    if uri.startswith("sqlite"):
        folder, subject = Path(make_url(uri).database or "").resolve().parent, model
    else:
        folder, subject = Path(tempfile.gettempdir()) / f"rlhf-{os.getuid()}", f"{uri} {model}"
    digest = hashlib.sha256(subject.encode()).hexdigest()[:16]
    with locked(folder, f"registry-{digest}.lock", wait=True):
        yield


RETRIES = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "5"}  # after 4, 8, 16 and 32 seconds; MLflow retries for four minutes


@contextmanager
def registry_session(workspace: Path) -> Iterator[ReleaseState]:
    """Lock the registered policy of ``workspace`` for the block, after completing what an earlier call began."""
    workspace = workspace.resolve()
    name = load_section(workspace, "registry", RegistryConfig).policy
    client = prepare_tracking(workspace)
    with registry_lock(workspace, name), default_environment(RETRIES):
        yield finish_interrupted(client, workspace, name)


def ownership(workspace: Path) -> str:
    """The tag that says that ``workspace`` is the owner: its id, then its folder for messages."""
    return f"{workspace_id(workspace)} {workspace}"


def other_owner(state: ReleaseState) -> str:
    """The folder of the workspace that owns the model, where it is not that of ``state``; empty without an owner."""
    owner, _, folder = ("" if state.model is None else state.model.tags.get(OWNER_TAG, "")).partition(" ")
    return "" if owner in ("", workspace_id(state.workspace)) else folder


def not_the_owner(state: ReleaseState) -> str:
    """Why the workspace of ``state`` may not decide on the champion; empty if it may."""
    folder = other_owner(state)
    if not folder:
        return ""
    return (
        f"{state.name} is owned by {folder}: promote there, or set another name in registry.policy; if that folder is "
        f"gone, delete the tag {OWNER_TAG} of {state.name} in MLflow, and the next promotion makes its workspace the "
        "owner"
    )


def describe_terms(workspace: Path) -> str:
    """Say who owns the registered policy of ``workspace``, and what a promotion by this workspace requires."""
    workspace = workspace.resolve()
    config = load_section(workspace, "registry", RegistryConfig)
    state = ReleaseState.read(connect(workspace), workspace, config.policy)
    if state.model is None or OWNER_TAG not in state.model.tags:
        owner = "nobody yet: whoever promotes first"
    else:
        owner = other_owner(state) or "this workspace"
    lines = [
        f"{config.policy}, owned by {owner}",
        f"every judge's lower 95 % bound of the win rate above {config.promote_win_rate_low95:g}",
        f"error budget {config.error_budget:g} over all attempts on the same prompts",
    ]
    margins = config.non_inferiority.model_dump(exclude={"min_refusals", "min_category_prompts"}, exclude_none=True)
    held = ", ".join(f"{name} {margin:g}" for name, margin in margins.items())
    lines += [f"worse than the champion by less than: {held}"] if held else []
    lines += ["a person approves each promotion (`rlhf approve`)"] if config.approval else []
    for name, conditions in gate_conditions(workspace).items():
        bounds = [f"{condition.metric} {describe_bound(condition)}" for condition in conditions]
        lines += [f"gates.{name}: {', '.join(bounds)}"] if bounds else []
    return "\n".join(lines)
