"""Promotion and rollback: promote only if every judge's lower 95 % bound clears the threshold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from flows.registry.aliases import CHALLENGER, CHAMPION, get_version, registry_errors
from flows.registry.approval import request_transaction, withdraw_transaction
from flows.registry.champion_change import (
    ROLLED_BACK_TAG,
    champion_transaction,
    champion_versions,
    cleared_refusals,
    promotion_obstacle,
)
from flows.registry.decisions import (
    AliasTransaction,
    PromotionDecision,
    RollbackDecision,
    VersionTag,
    as_report,
    publish_decision,
    read_decisions,
)
from flows.registry.evidence import gate_conditions
from flows.registry.history import latest_request
from flows.registry.match import PlayMatch, decided_by, make_attempt, play_match
from flows.registry.session import RegistrySession, not_the_owner, ownership, registry_session
from flows.registry.stored_models import verified_folder
from flows.registry.workspace import OWNER_TAG, printed_line
from rlhf_core.errors import RlhfError
from rlhf_core.evaluation.promotion import non_inferiority_criteria, win_rate_criteria

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion


def promote(
    workspace: Path,
    *,
    version: str | None = None,
    force_reason: str | None = None,
    dry_run: bool = False,
    approval: bool = False,
    play: PlayMatch = play_match,
) -> PromotionDecision:
    """Decide whether the challenger becomes ``@champion``, act on it, and keep the decision as an immutable report.

    The registered files must be the ones that the gates judged, and the version must have passed every gate. Only the
    workspace that owns the registered model promotes (:mod:`flows.registry.session`). Where there was never a
    champion the challenger then takes the place at once; else every criterion of
    :mod:`rlhf_core.evaluation.promotion` must hold. With ``registry.approval`` a challenger that passes is not
    promoted, forced or not: it waits for :func:`flows.registry.approval.approve`.

    Args:
        version: The version to promote; default: the one that ``@challenger`` points to.
        force_reason: Promote whatever gates and match say; the reason is recorded. Changed files stay refused, and so
            does a workspace that does not own the registered model.
        dry_run: Decide and change nothing.
        approval: Ask a person although the settings do not.
        play: Plays the match of two model folders ``(workspace, champion, challenger, prompt_set)``.

    Raises:
        RlhfError: The registry does not answer, there is no challenger, or its files have changed. Nothing has moved.
    """
    workspace = workspace.resolve()
    if force_reason is not None and not printed_line(force_reason):
        raise RlhfError("a forced promotion needs a reason; say why, it is recorded")
    with registry_session(workspace) as session:
        config = session.config
        challenger = _challenger(session, version)
        champion = session.version_with(CHAMPION)
        decision = replace(_decide(session, challenger, champion, force_reason, play), dry_run=dry_run)
        transaction: AliasTransaction | None = None
        if approval or config.approval:
            decision, transaction = _approval_step(session, decision)
        elif decision.promoted and not dry_run:
            champions = [*champion_versions(session.model), decision.challenger]
            cleared = cleared_refusals(challenger)
            owner = {OWNER_TAG: ownership(workspace)}
            transaction = champion_transaction(session.client, config, champions, cleared, decision, model_tags=owner)
        if dry_run or decision.unchanged:
            return decision
        if transaction is not None:
            return replace(decision, report=session.commit(transaction))
        with registry_errors("record the decision; nothing has moved"):
            report = publish_decision(
                session.client, workspace, config.policy, decision.challenger, as_report(decision)
            )
        return replace(decision, report=report)


def _approval_step(
    session: RegistrySession, decision: PromotionDecision
) -> tuple[PromotionDecision, AliasTransaction | None]:
    """Request approval of a promotion instead of carrying it out, or end a request whose version no longer passes."""
    request = latest_request(decision.model, session.records)
    is_open = request is not None and request.is_about(decision.challenger, decision.champion)
    if decision.promoted:
        decision = decision.to_approve(unchanged=is_open)
        return decision, request_transaction(session.aliases, decision, {OWNER_TAG: ownership(session.workspace)})
    if is_open and decision.match is not None:
        decision = replace(decision, unchanged=False)
        return decision, withdraw_transaction(decision)
    return decision, None


def _challenger(session: RegistrySession, number: str | None) -> ModelVersion:
    if number is not None:
        return get_version(session.client, session.config.policy, number)
    challenger = session.version_with(CHALLENGER)
    if challenger is None:
        raise RlhfError(f"{session.config.policy} has no @{CHALLENGER}; `rlhf run` registers one once its gates pass")
    return challenger


def _decide(
    session: RegistrySession,
    challenger: ModelVersion,
    champion: ModelVersion | None,
    force_reason: str | None,
    play: PlayMatch,
) -> PromotionDecision:
    client, workspace, config = session.client, session.workspace, session.config
    decision = PromotionDecision(
        model=config.policy,
        challenger=str(challenger.version),
        champion=None if champion is None else str(champion.version),
        bar=config.promote_win_rate_low95,
        forced=force_reason,
    )
    if champion is not None and champion.version == challenger.version:
        return decision.refused("the challenger is the champion already", unchanged=True)
    if not_allowed := not_the_owner(config.policy, session.model, workspace):
        return decision.refused(not_allowed, unchanged=True)
    folder = verified_folder(workspace, challenger, client)
    obstacle = promotion_obstacle(challenger, gate_conditions(workspace))
    if obstacle and force_reason is None:
        return decision.refused(f"{obstacle}; promote it with --force --reason TEXT", unchanged=True)
    if champion is None:
        removed = _removed_champion(session)
        if removed and force_reason is None:
            return decision.refused(removed, unchanged=True)
        reason = "; ".join(part for part in (obstacle, removed) if part) or "there was no champion"
        passed = not (obstacle or removed)
    else:
        try:
            champion_files = verified_folder(workspace, champion, client)
            attempt = make_attempt(
                *(client, workspace, config, challenger, champion),
                lambda prompt_set: play(workspace, champion_files, folder, prompt_set),
            )
            question, match = attempt.question, attempt.match
            criteria = (
                *win_rate_criteria(match, config.promote_win_rate_low95, config.error_budget, attempt.number),
                *non_inferiority_criteria(match, config.non_inferiority),
            )
            decision = replace(decision, question=question, match=match, attempt=attempt.number, criteria=criteria)
            passed, reason = decided_by(match, config.promote_win_rate_low95, criteria)
        except RlhfError as error:
            if force_reason is None:
                raise
            passed, reason = False, f"no match: {error}"
        reason = "; ".join(part for part in (obstacle, reason) if part)
    if force_reason is not None:
        return decision.accepted(f"forced: {printed_line(force_reason)} (otherwise: {reason})")
    if passed:
        return decision.accepted(reason)
    refused = decision.refused(reason)
    return replace(refused, unchanged=_was_refused_before(workspace, refused))


def _removed_champion(session: RegistrySession) -> str:
    """Why a place without champion is not free: whoever removed the alias would spare a challenger its match."""
    champions = champion_versions(session.model)
    if not champions:
        return ""
    return (
        f"version {champions[-1]} was champion, and @{CHAMPION} was removed by something else than rlhf, so there is "
        f"nothing to compare with; `rlhf promote --version {champions[-1]} --force --reason TEXT` restores it"
    )


def _was_refused_before(workspace: Path, decision: PromotionDecision) -> bool:
    known = ("question", "bar", "reason")
    return any(all(d.get(key) == getattr(decision, key) for key in known) for d in read_decisions(workspace))


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
    reason = printed_line(reason)
    if not reason:
        raise RlhfError("a rollback needs a reason; say why, it is recorded")
    with registry_session(workspace) as session:
        config, champion = session.config, session.version_with(CHAMPION)
        history = champion_versions(session.model)
        if champion is None or len(history) < 2:
            raise RlhfError(f"{config.policy} has no earlier champion to go back to; `rlhf status` shows what there is")
        if to is not None and to not in history[:-1]:
            earlier = ", ".join(history[:-1])
            raise RlhfError(f"version {to} of {config.policy} is no earlier champion; go back to one of: {earlier}")
        target = get_version(session.client, config.policy, to or history[-2])
        verified_folder(workspace, target, session.client)
        replaced = str(champion.version)
        decision = RollbackDecision(config.policy, str(target.version), replaced, reason)
        tags = [VersionTag(config.policy, replaced, ROLLED_BACK_TAG, reason[:1000])]
        remaining = history[: history.index(str(target.version)) + 1]
        transaction = champion_transaction(session.client, config, remaining, tags, decision)
        return replace(decision, report=session.commit(transaction))
