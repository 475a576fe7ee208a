"""Promotion and rollback: promote only if every judge's lower 95 % bound clears the threshold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from flows.registry.alias_transaction import (
    AliasMove,
    AliasTransaction,
    VersionTag,
    champion_history,
    commit,
    finish_interrupted,
)
from flows.registry.aliases import CHALLENGER, CHAMPION, PREVIOUS, alias_version, get_version, registry_errors
from flows.registry.decisions import (
    PromotionDecision,
    RollbackDecision,
    as_report,
    publish_decision,
    read_decisions,
)
from flows.registry.governance.attempts import attempt_number
from flows.registry.governance.lock import registry_lock
from flows.registry.governance.terms import (
    TERMS_TAG,
    PromotionTerms,
    read_conditions,
    read_terms,
    refusal,
    terms_of,
    updated,
)
from flows.registry.match import PlayMatch, decided_by, match_question, match_result, play_match
from flows.registry.mlflow_client import connect, prepare_tracking
from flows.registry.model_artifacts import verified_folder
from flows.registry.register import (
    COMPLETE_TAG,
    CONDITIONS_TAG,
    GATES_PASSED,
    GATES_TAG,
    REWARD_VERSION_TAG,
    UNGATED_TAG,
)
from rlhf_core.config.loading.load import load_section
from rlhf_core.config.operations import RegistryConfig
from rlhf_core.errors import RlhfError
from rlhf_core.evaluation.promotion.criteria import non_inferiority_criteria, win_rate_criteria

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

ROLLED_BACK_TAG = "rolled_back"


def promote(
    workspace: Path,
    *,
    version: str | None = None,
    force_reason: str | None = None,
    dry_run: bool = False,
    expected: str | None = None,
    play: PlayMatch = play_match,
) -> PromotionDecision:
    """Decide whether the challenger becomes ``@champion``, act on it, and keep the decision as an immutable report.

    The registered files must be the ones that the gates judged, and the version must have passed every gate. The terms
    of the registered model must be met (:mod:`flows.registry.governance.terms`), whichever workspace promotes. Without
    a champion the challenger then takes the place at once; else every criterion of
    :mod:`rlhf_core.evaluation.promotion.criteria` must hold.

    Args:
        version: The version to promote; default: the one that ``@challenger`` points to.
        force_reason: Promote whatever gates and match say; the reason is recorded. Changed files stay refused, and so
            does a workspace that does not own the registered model.
        dry_run: Decide and change nothing.
        expected: The challenger that was looked at before; another one in its place is refused.
        play: Plays the match of two model folders ``(workspace, champion, challenger)``.

    Raises:
        RlhfError: The registry does not answer, there is no challenger, or its files have changed. Nothing has moved.
    """
    workspace = workspace.resolve()
    if force_reason is not None and not force_reason.strip():
        raise RlhfError("a forced promotion needs a reason; say why, it is recorded")
    config = load_section(workspace, "registry", RegistryConfig)
    prepare_tracking(workspace)
    with registry_lock(workspace, config.policy):
        client = connect(workspace)
        entries = finish_interrupted(client, workspace, config)
        challenger = _challenger(client, config, version)
        if expected not in (None, str(challenger.version)):
            raise RlhfError(f"the challenger is version {challenger.version} now, not {expected}; look at it again")
        champion = alias_version(client, config.policy, CHAMPION)
        held, here = read_terms(client, config.policy), terms_of(workspace, config)
        decision = replace(
            _decide(client, workspace, config, challenger, champion, force_reason, play, held, here), dry_run=dry_run
        )
        if dry_run or decision.unchanged:
            return decision
        if decision.promoted:
            terms = updated(held, here)
            transaction = _transaction(
                client,
                config,
                [*_history(client, config, champion), str(challenger.version)],
                _cleared_rollback(challenger),
                decision,
                model_tags={} if terms is held else {TERMS_TAG: terms.to_json()},
            )
            return replace(decision, report=commit(client, workspace, transaction, entries))
        with registry_errors("record the decision; nothing has moved"):
            report = publish_decision(client, workspace, config.policy, str(challenger.version), as_report(decision))
        return replace(decision, report=report)


def _challenger(client: MlflowClient, config: RegistryConfig, number: str | None) -> ModelVersion:
    if number is not None:
        return get_version(client, config.policy, number)
    challenger = alias_version(client, config.policy, CHALLENGER)
    if challenger is None:
        raise RlhfError(f"{config.policy} has no @{CHALLENGER}; `rlhf run` registers one once its gates pass")
    return challenger


def _decide(
    client: MlflowClient,
    workspace: Path,
    config: RegistryConfig,
    challenger: ModelVersion,
    champion: ModelVersion | None,
    force_reason: str | None,
    play: PlayMatch,
    held: PromotionTerms | None,
    here: PromotionTerms,
) -> PromotionDecision:
    decision = PromotionDecision(
        model=config.policy,
        challenger=str(challenger.version),
        champion=None if champion is None else str(champion.version),
        bar=config.promote_win_rate_low95,
        forced=force_reason,
    )
    if champion is not None and champion.version == challenger.version:
        return decision.refused("the challenger is the champion already", unchanged=True)
    if not_allowed := refusal(config.policy, held, here, forced=force_reason is not None):
        return decision.refused(not_allowed, unchanged=True)
    folder = verified_folder(workspace, challenger)
    obstacle = promotion_obstacle(challenger, held)
    if obstacle and force_reason is None:
        return decision.refused(f"{obstacle}; promote it with --force --reason TEXT", unchanged=True)
    if champion is None:
        passed, reason = not obstacle, obstacle or "there was no champion"
    else:
        try:
            champion_files = verified_folder(workspace, champion)
            question = match_question(workspace, challenger, champion)
            match = match_result(
                client, workspace, challenger, question, lambda: play(workspace, champion_files, folder)
            )
            attempt = attempt_number(client, config.policy, here.prompts, question)
            criteria = (
                *win_rate_criteria(match, config.promote_win_rate_low95, config.error_budget, attempt),
                *non_inferiority_criteria(match, config.non_inferiority),
            )
            decision = replace(decision, question=question, match=match, attempt=attempt, criteria=criteria)
            passed, reason = decided_by(match, config.promote_win_rate_low95, criteria)
        except RlhfError as error:
            if force_reason is None:
                raise
            passed, reason = False, f"no match: {error}"
        reason = "; ".join(part for part in (obstacle, reason) if part)
    if force_reason is not None:
        return decision.accepted(f"forced: {force_reason.strip()} (otherwise: {reason})")
    if passed:
        return decision.accepted(reason)
    refused = decision.refused(reason)
    return replace(refused, unchanged=_was_refused_before(workspace, refused))


def promotion_obstacle(version: ModelVersion, terms: PromotionTerms | None = None) -> str:
    """Why a version must not be promoted without force, by what is recorded of it; empty if nothing stands against.

    Args:
        terms: What its gates must have required, None for whatever they did.
    """
    number = f"version {version.version}"
    if version.tags.get(COMPLETE_TAG) != "true":
        return f"{number} is incomplete: its registration was interrupted"
    if version.tags.get(GATES_TAG) != GATES_PASSED:
        return f"{number} is ungated ({version.tags.get(UNGATED_TAG) or 'no record that its gates passed'})"
    if ROLLED_BACK_TAG in version.tags:
        return f"{number} was rolled back ({version.tags[ROLLED_BACK_TAG]})"
    return "" if terms is None else _gate_obstacle(version, terms)


def _gate_obstacle(version: ModelVersion, terms: PromotionTerms) -> str:
    """Why the conditions that a version has passed are not those that the registered model requires."""
    text = version.tags.get(CONDITIONS_TAG)
    if text is None:
        return f"version {version.version} has no record of its gates' conditions; `rlhf run` registers it again"
    try:
        conditions = read_conditions(json.loads(text))
    except (ValueError, TypeError, AttributeError):
        return f"the conditions of version {version.version} cannot be read; `rlhf run` registers it again"
    weaker = terms.weaker_gates(conditions)
    return f"version {version.version} has passed weaker gates: {'; '.join(weaker)}" if weaker else ""


def _was_refused_before(workspace: Path, decision: PromotionDecision) -> bool:
    known = ("question", "bar", "reason")
    return any(all(d.get(key) == getattr(decision, key) for key in known) for d in read_decisions(workspace))


def _history(client: MlflowClient, config: RegistryConfig, champion: ModelVersion | None) -> list[str]:
    """The versions that have been champion, oldest first, ending with the present one."""
    history = list(champion_history(client, config.policy))
    if not history:  # a registry from before the history was kept
        previous = alias_version(client, config.policy, PREVIOUS)
        history = [] if previous is None else [str(previous.version)]
    if champion is not None and history[-1:] != [str(champion.version)]:
        history.append(str(champion.version))
    return history


def _cleared_rollback(version: ModelVersion) -> list[VersionTag]:
    if ROLLED_BACK_TAG not in version.tags:
        return []
    return [VersionTag(version.name, str(version.version), ROLLED_BACK_TAG, None)]


def _transaction(
    client: MlflowClient,
    config: RegistryConfig,
    history: list[str],
    version_tags: list[VersionTag],
    decision: PromotionDecision | RollbackDecision,
    model_tags: Mapping[str, str] | None = None,
) -> AliasTransaction:
    """Aliases of the policy and of the reward model that trained it, after the last of ``history`` became champion."""
    champion = history[-1]
    history = [*(number for number in history[:-1] if number != champion), champion]
    previous = history[-2] if len(history) > 1 else None
    moves = [AliasMove(config.policy, CHAMPION, champion), AliasMove(config.policy, PREVIOUS, previous)]
    reward = _reward_version(client, config, champion)
    if reward is not None:
        earlier = None if previous is None else _reward_version(client, config, previous)
        moves.append(AliasMove(config.reward_model, CHAMPION, reward))
        moves.append(AliasMove(config.reward_model, PREVIOUS, None if earlier == reward else earlier))
    return AliasTransaction(
        model=config.policy,
        moves=tuple(moves),
        version_tags=tuple(version_tags),
        history=tuple(history),
        decision=as_report(decision),
        decided_on=champion,
        action=decision.action,
        reason=decision.reason,
        model_tags=model_tags or {},
    )


def _reward_version(client: MlflowClient, config: RegistryConfig, policy_version: str) -> str | None:
    return get_version(client, config.policy, policy_version).tags.get(REWARD_VERSION_TAG)


def rollback(workspace: Path, reason: str, to: str | None = None) -> RollbackDecision:
    """Make an earlier champion the champion again, with the reward model behind it, and record why.

    The version that is replaced is marked as rolled back: it leaves the history of champions, so a second rollback
    goes further back, and only a forced promotion brings it back.

    Args:
        reason: Recorded with the decision.
        to: A version that has been champion before; default: the champion before the present one.

    Raises:
        RlhfError: The reason is empty, there is nothing to go back to, or the files of the target have changed.
    """
    workspace = workspace.resolve()
    if not reason.strip():
        raise RlhfError("a rollback needs a reason; say why, it is recorded")
    config = load_section(workspace, "registry", RegistryConfig)
    prepare_tracking(workspace)
    with registry_lock(workspace, config.policy):
        client = connect(workspace)
        entries = finish_interrupted(client, workspace, config)
        champion = alias_version(client, config.policy, CHAMPION)
        history = [] if champion is None else _history(client, config, champion)
        if champion is None or len(history) < 2:
            raise RlhfError(f"{config.policy} has no earlier champion to go back to; `rlhf status` shows what there is")
        if to is not None and to not in history[:-1]:
            earlier = ", ".join(history[:-1])
            raise RlhfError(f"version {to} of {config.policy} is no earlier champion; go back to one of: {earlier}")
        target = get_version(client, config.policy, to or history[-2])
        verified_folder(workspace, target)
        replaced = str(champion.version)
        decision = RollbackDecision(config.policy, str(target.version), replaced, reason.strip())
        tags = [VersionTag(config.policy, replaced, ROLLED_BACK_TAG, reason.strip()[:1000])]
        remaining = history[: history.index(str(target.version)) + 1]
        transaction = _transaction(client, config, remaining, tags, decision)
        return replace(decision, report=commit(client, workspace, transaction, entries))


def decline(workspace: Path, plan: PromotionDecision, reason: str) -> PromotionDecision:
    """Record that a person refused the promotion that a dry run had planned; nothing moves."""
    workspace = workspace.resolve()
    config = load_section(workspace, "registry", RegistryConfig)
    refusal = replace(plan.refused(f"not approved: {reason.strip() or 'no reason given'}"), dry_run=False)
    with registry_lock(workspace, config.policy):
        client = connect(workspace)
        finish_interrupted(client, workspace, config)
        with registry_errors("record the decision; nothing has moved"):
            report = publish_decision(client, workspace, plan.model, plan.challenger, as_report(refusal))
    return replace(refusal, report=report)
