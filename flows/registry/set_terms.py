"""``rlhf terms``: show the terms of promotion of a registered policy, and let its owner change them."""

from __future__ import annotations

from pathlib import Path

from flows.registry.governance.printed_line import printed_line
from flows.registry.governance.terms import GATES, TERMS_TAG, PromotionTerms, read_terms, terms_of
from flows.registry.mlflow_client import connect
from flows.registry.transactions.alias_transaction import AliasTransaction
from flows.registry.transactions.session import registry_session
from rlhf_core.config.loading.load import load_section
from rlhf_core.config.operations.operations import RegistryConfig
from rlhf_core.errors import RlhfError
from rlhf_core.gates import describe_bound


def set_terms(workspace: Path, reason: str, *, take_over: bool = False) -> PromotionTerms:
    """Make the settings of ``workspace`` the terms of its registered policy, and record who did it and why.

    Args:
        take_over: Set them although another workspace owns the registered policy, or what they were cannot be read.

    Raises:
        RlhfError: The reason is empty, the policy has no version yet, or another workspace owns it.
    """
    workspace = workspace.resolve()
    reason = printed_line(reason)
    if not reason:
        raise RlhfError("new terms of promotion need a reason; add --reason TEXT, it is recorded")
    with registry_session(workspace) as session:
        config = session.config
        if session.model is None:
            raise RlhfError(f"{config.policy} has no version yet; its first promotion sets the terms")
        here = terms_of(workspace, config)
        held = None if take_over else session.terms()
        if held is not None and held.owner != here.owner:
            raise RlhfError(
                f"{config.policy} is owned by another workspace (terms set by {held.origin}); change them there, or "
                "become the owner with --take-over"
            )
        action = "take over" if take_over else "terms"
        transaction = AliasTransaction(
            config.policy, (), action=action, reason=reason, model_tags={TERMS_TAG: here.to_json()}
        )
        session.commit(transaction)
    return here


def describe_terms(workspace: Path) -> str:
    """Say what the registered policy of ``workspace`` requires, and where this workspace requires less."""
    workspace = workspace.resolve()
    config = load_section(workspace, "registry", RegistryConfig)
    held, here = read_terms(connect(workspace), config.policy), terms_of(workspace, config)
    if held is None:
        return f"{config.policy} has no terms of promotion yet: its first promotion sets them from its workspace"
    owned = held.owner == here.owner
    lines = [
        f"{config.policy}, owned by {'this workspace' if owned else held.workspace}",
        f"set by {held.origin}",
        f"every judge's lower 95 % bound of the win rate above {held.bar:g}",
    ]
    lines += ["a person approves each promotion (`rlhf approve`)"] if held.approval else []
    for name in GATES:
        conditions = [f"{condition.metric} {describe_bound(condition)}" for condition in held.gates.get(name, ())]
        lines += [f"gates.{name}: {', '.join(conditions)}"] if conditions else []
    differences = held.weaker_bounds(here) + ([] if owned else held.different_match(here))
    lines += [f"this workspace: {difference}" for difference in differences]
    return "\n".join(lines)
