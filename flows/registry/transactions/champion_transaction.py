"""The change of the registry that makes another version champion, with the reward model behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from flows.registry.transactions.alias_transaction import AliasMove, AliasTransaction, VersionTag, champion_history
from flows.registry.transactions.aliases import CHAMPION, PREVIOUS, aliases_of, get_version
from flows.registry.transactions.decisions import PromotionDecision, RollbackDecision, as_report
from flows.registry.versions.register import REWARD_VERSION_TAG
from rlhf_core.config.operations.operations import RegistryConfig

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
