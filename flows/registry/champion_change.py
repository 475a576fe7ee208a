"""What makes another version champion, with the reward model behind it, and what stands against it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from flows.registry.aliases import CHAMPION, PREVIOUS, aliases_of, get_version
from flows.registry.decisions import (
    AliasMove,
    AliasTransaction,
    PromotionDecision,
    RollbackDecision,
    VersionTag,
    as_report,
    champion_history,
)
from flows.registry.evidence import weaker_gates
from flows.registry.register import CONDITIONS_TAG, GATES_PASSED, GATES_TAG, REWARD_VERSION_TAG, UNGATED_TAG
from flows.registry.stored_models import COMPLETE_TAG
from rlhf_core.config.gates import Condition
from rlhf_core.config.operations import RegistryConfig

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion, RegisteredModel


ROLLED_BACK_TAG, DECLINED_TAG = "rolled_back", "declined"


def champion_versions(model: RegisteredModel | None) -> list[str]:
    """The versions that have been champion, oldest first, ending with the present one."""
    aliases = aliases_of(model)
    history = list(champion_history(model))
    if CHAMPION in aliases and history[-1:] != [aliases[CHAMPION]]:
        history.append(aliases[CHAMPION])
    return history


def cleared_refusals(version: ModelVersion) -> list[VersionTag]:
    """Remove from a version that becomes champion that it was rolled back or declined."""
    tags = (ROLLED_BACK_TAG, DECLINED_TAG)
    return [VersionTag(version.name, str(version.version), tag, None) for tag in tags if tag in version.tags]


def champion_transaction(
    client: MlflowClient,
    config: RegistryConfig,
    history: Sequence[str],
    version_tags: Sequence[VersionTag],
    decision: PromotionDecision | RollbackDecision,
    *,
    action: str = "",
    model_tags: Mapping[str, str] | None = None,
) -> AliasTransaction:
    """Aliases of the policy and of the reward model that trained it, after the last of ``history`` became champion.

    Args:
        action: What the history calls it, by default the action of ``decision``.
    """
    champion = history[-1]
    history = [*(number for number in history[:-1] if number != champion), champion]
    previous = history[-2] if len(history) > 1 else None
    moves = [AliasMove(config.policy, PREVIOUS, previous), AliasMove(config.policy, CHAMPION, champion)]
    reward = _reward_version(client, config, champion)
    if reward is not None:
        earlier = None if previous is None else _reward_version(client, config, previous)
        moves.append(AliasMove(config.reward_model, PREVIOUS, None if earlier == reward else earlier))
        moves.append(AliasMove(config.reward_model, CHAMPION, reward))
    return AliasTransaction(
        model=config.policy,
        moves=tuple(moves),
        version_tags=tuple(version_tags),
        history=tuple(history),
        decision=as_report(decision),
        decided_on=champion,
        action=action or decision.action,
        reason=decision.reason,
        model_tags=model_tags or {},
    )


def _reward_version(client: MlflowClient, config: RegistryConfig, policy_version: str) -> str | None:
    return get_version(client, config.policy, policy_version).tags.get(REWARD_VERSION_TAG)


def promotion_obstacle(version: ModelVersion, required: Mapping[str, Sequence[Condition]] | None = None) -> str:
    """Why a version must not be promoted without force, by what is recorded of it; empty if nothing stands against.

    Args:
        required: The conditions by gate that it must have passed, None for whatever its gates required.
    """
    number = f"version {version.version}"
    if version.tags.get(COMPLETE_TAG) != "true":
        return f"{number} is incomplete: its registration was interrupted"
    if version.tags.get(GATES_TAG) != GATES_PASSED:
        return f"{number} is ungated ({version.tags.get(UNGATED_TAG) or 'no record that its gates passed'})"
    if ROLLED_BACK_TAG in version.tags:
        return f"{number} was rolled back ({version.tags[ROLLED_BACK_TAG]})"
    if DECLINED_TAG in version.tags:
        return f"{number} was {version.tags[DECLINED_TAG]}"
    return "" if required is None else _gate_obstacle(version, required)


def _gate_obstacle(version: ModelVersion, required: Mapping[str, Sequence[Condition]]) -> str:
    """Why the conditions that a version has passed are not those that are required: another workspace made it."""
    text = version.tags.get(CONDITIONS_TAG)
    if text is None:
        return f"version {version.version} has no record of its gates' conditions; `rlhf run` registers it again"
    try:
        weaker = weaker_gates(json.loads(text), required)
    except (ValueError, TypeError, AttributeError):
        return f"the conditions of version {version.version} cannot be read; `rlhf run` registers it again"
    return f"version {version.version} has passed weaker gates: {'; '.join(weaker)}" if weaker else ""
