"""The owner of a registered policy: the one workspace whose settings decide on its champion.

Its first promotion makes a workspace the owner, by a tag of the registered model. Other workspaces may register
versions under the same name; whether one becomes champion is decided by the owner's gates, prompts, judge and bounds.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from flows.registry.evidence.gate_evidence import GATES
from flows.registry.governance.identity import OWNER_TAG, workspace_id
from flows.registry.governance.printed_line import printed_line
from flows.registry.mlflow_client import connect
from flows.registry.transactions.alias_transaction import AliasTransaction
from flows.registry.transactions.aliases import registered_model
from flows.registry.transactions.session import registry_session
from rlhf_core.config.loading.load import load_section
from rlhf_core.config.operations.operations import RegistryConfig
from rlhf_core.config.stages.gates import GatesConfig
from rlhf_core.errors import RlhfError
from rlhf_core.gates import describe_bound

if TYPE_CHECKING:
    from mlflow.entities.model_registry import RegisteredModel

TAKE_OVER = "take over"


def ownership(workspace: Path) -> str:
    """The tag that says that ``workspace`` is the owner: its id, then its folder for messages."""
    return f"{workspace_id(workspace)} {workspace}"


def other_owner(model: RegisteredModel | None, workspace: Path) -> str:
    """The folder of the workspace that owns ``model``; empty if it is ``workspace``, or there is no owner yet."""
    owner, _, folder = ("" if model is None else model.tags.get(OWNER_TAG, "")).partition(" ")
    return "" if owner in ("", workspace_id(workspace)) else folder


def not_the_owner(name: str, model: RegisteredModel | None, workspace: Path) -> str:
    """Why ``workspace`` may not decide on the champion of ``name``; empty if it may."""
    folder = other_owner(model, workspace)
    if not folder:
        return ""
    return (
        f"{name} is owned by {folder}: promote there, set another name in registry.policy, or become the owner with "
        "`rlhf terms --take-over --reason TEXT`"
    )


def take_over(workspace: Path, reason: str) -> None:
    """Make ``workspace`` the owner of its registered policy, and record who did it and why.

    Raises:
        RlhfError: The reason is empty, or the policy has no version yet.
    """
    workspace = workspace.resolve()
    reason = printed_line(reason)
    if not reason:
        raise RlhfError("to become the owner needs a reason; add --reason TEXT, it is recorded")
    with registry_session(workspace) as session:
        name = session.config.policy
        if session.model is None:
            raise RlhfError(f"{name} has no version yet; whoever promotes the first one becomes its owner")
        session.commit(
            AliasTransaction(name, (), action=TAKE_OVER, reason=reason, model_tags={OWNER_TAG: ownership(workspace)})
        )


def describe_terms(workspace: Path) -> str:
    """Say who owns the registered policy of ``workspace``, and what a promotion by this workspace requires."""
    workspace = workspace.resolve()
    config = load_section(workspace, "registry", RegistryConfig)
    model = registered_model(connect(workspace), config.policy)
    if model is None or OWNER_TAG not in model.tags:
        owner = "nobody yet: whoever promotes first"
    else:
        owner = other_owner(model, workspace) or "this workspace"
    lines = [
        f"{config.policy}, owned by {owner}",
        f"every judge's lower 95 % bound of the win rate above {config.promote_win_rate_low95:g}",
        f"error budget {config.error_budget:g} over all attempts on the same prompts",
    ]
    lines += ["a person approves each promotion (`rlhf approve`)"] if config.approval else []
    gates = load_section(workspace, "gates", GatesConfig)
    for name in GATES:
        bounds = [f"{condition.metric} {describe_bound(condition)}" for condition in getattr(gates, name)]
        lines += [f"gates.{name}: {', '.join(bounds)}"] if bounds else []
    return "\n".join(lines)
