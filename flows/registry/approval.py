"""Approval: a named person decides on the version that passed everything a promotion requires."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from flows.registry.aliases import CHALLENGER, get_version
from flows.registry.champion_change import (
    DECLINED_TAG,
    champion_transaction,
    champion_versions,
    cleared_refusals,
    promotion_obstacle,
)
from flows.registry.decisions import AliasMove, AliasTransaction, PromotionDecision, VersionTag, as_report, utc_now
from flows.registry.history import (
    APPROVE,
    DECLINE,
    REQUEST,
    WITHDRAW,
    ApprovalRequest,
    request_to_decide,
)
from flows.registry.session import registry_session
from flows.registry.stored_models import verified_folder
from flows.registry.workspace import actor, printed_line
from rlhf_core.errors import RlhfError

REASON_LIMIT = 1000


def request_transaction(
    aliases: Mapping[str, str], decision: PromotionDecision, model_tags: Mapping[str, str]
) -> AliasTransaction:
    """The request for approval of a promotion; a version that was named is the challenger from then on."""
    is_challenger = aliases.get(CHALLENGER) == decision.challenger
    return AliasTransaction(
        decision.model,
        () if is_challenger else (AliasMove(decision.model, CHALLENGER, decision.challenger),),
        decision=as_report(decision),
        decided_on=decision.challenger,
        action=REQUEST,
        reason=decision.reason,
        model_tags=model_tags,
    )


def withdraw_transaction(decision: PromotionDecision) -> AliasTransaction:
    """The end of a request for approval whose version was judged again and did not pass."""
    return AliasTransaction(
        decision.model,
        (),
        decision=as_report(decision),
        decided_on=decision.challenger,
        action=WITHDRAW,
        reason=decision.reason,
    )


def approve(workspace: Path, reason: str = "", version: str | None = None) -> PromotionDecision:
    """Make the version that waits for approval the champion, and record who approved it.

    Nothing is judged anew: the request in the history says that the version passed, and it stands only while champion
    and challenger are those that it was judged by.

    Args:
        reason: Recorded with the decision.
        version: The version that was looked at; another one in its place is refused.

    Raises:
        RlhfError: No version waits, it is another one, the registry has changed since, or its files have. Nothing has
            moved.
    """
    workspace = workspace.resolve()
    with registry_session(workspace) as session:
        client, config = session.client, session.config
        request = request_to_decide(config.policy, session.records, session.aliases, version)
        challenger = get_version(client, config.policy, request.challenger)
        verified_folder(workspace, challenger, client)
        obstacle = promotion_obstacle(challenger)
        planned = _planned(request)
        if obstacle and planned.forced is None:
            raise RlhfError(f"{obstacle}; it cannot be approved")
        why = printed_line(reason)[:REASON_LIMIT]
        approval = f"approved by {actor()}" + (f": {why}" if why else "")
        decision = replace(planned, approval=approval).accepted(f"{approval} ({planned.reason})")
        champions = [*champion_versions(session.model), request.challenger]
        cleared = cleared_refusals(challenger)
        transaction = champion_transaction(client, config, champions, cleared, decision, action=APPROVE)
        return replace(decision, report=session.commit(transaction))


def decline(workspace: Path, reason: str, version: str | None = None) -> PromotionDecision:
    """Refuse the version that waits for approval, and record who did and why; nothing moves.

    The version is marked as declined: only a forced promotion asks for its approval again.

    Args:
        reason: Recorded with the decision.
        version: The version that was looked at; another one in its place is refused.

    Raises:
        RlhfError: The reason is empty, no version waits, it is another one, or the registry has changed since.
    """
    workspace = workspace.resolve()
    why = printed_line(reason)[:REASON_LIMIT]
    if not why:
        raise RlhfError("declining needs a reason; add --reason TEXT, it is recorded")
    with registry_session(workspace) as session:
        request = request_to_decide(session.config.policy, session.records, session.aliases, version)
        approval = f"declined by {actor()}: {why}"
        decision = replace(_planned(request), approval=approval).refused(approval)
        transaction = AliasTransaction(
            request.model,
            (),
            version_tags=(VersionTag(request.model, request.challenger, DECLINED_TAG, approval),),
            decision=as_report(decision),
            decided_on=request.challenger,
            action=DECLINE,
            reason=approval,
        )
        return replace(decision, report=session.commit(transaction))


def _planned(request: ApprovalRequest) -> PromotionDecision:
    """The decision that was requested, as far as the history holds it; the match is in the report of the request."""
    kept = {field.name for field in fields(PromotionDecision)} - {"report", "match", "question", "criteria"}
    values: dict[str, Any] = {name: value for name, value in request.decision.items() if name in kept}
    return replace(PromotionDecision(**values), awaiting_approval=False, who=actor(), time=utc_now())
