"""Approval: a named person decides on the version that passed everything a promotion requires.

With a pool, the Prefect flow run that asked waits suspended, without a process or a pool slot, until it is decided.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from httpx import HTTPError
from prefect import get_run_logger
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateName, FlowRunFilterTags
from prefect.context import FlowRunContext
from prefect.flow_runs import suspend_flow_run
from prefect.states import Cancelled, Completed, State

from flows.prefect_server.flow_runs import SUSPENDED
from flows.prefect_server.services import known_server
from flows.registry.aliases import CHALLENGER, get_version
from flows.registry.champion_change import (
    DECLINED_TAG,
    champion_transaction,
    champion_versions,
    cleared_refusals,
    promotion_obstacle,
)
from flows.registry.client import connect
from flows.registry.decisions import AliasMove, AliasTransaction, PromotionDecision, VersionTag, as_report, utc_now
from flows.registry.history import (
    APPROVE,
    DECLINE,
    REQUEST,
    WITHDRAW,
    ApprovalRequest,
    history_ledger,
    latest_request,
    read_history,
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


TAG = "rlhf-approval"


def follow_request(workspace: Path, decision: PromotionDecision) -> None:
    """Suspend this flow run while ``decision`` waits for approval, and cancel earlier runs that wait in vain.

    Suspending ends the process of the run. Only a run of a deployment can be suspended; any other goes on to its end,
    which makes no difference to the approval. A suspended run that is resumed on the server runs again, and suspends
    itself again if nobody has decided.
    """
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return
    run = context.flow_run
    try:
        request = latest_request(decision.model, read_history(connect(workspace), decision.model))
        may_suspend = run.deployment_id is not None and run.parent_task_run_id is None
        if request is None or (request.is_open and not may_suspend):
            return
        tag = _tag(workspace, decision.model)
        reason = f"superseded by {run.name}" if request.is_open else request.closed_because()
        with get_client(sync_client=True) as client:
            _end_suspended(client, tag, Cancelled(message=reason))
            if request.is_open:
                client.update_flow_run(run.id, tags=sorted({*client.read_flow_run(run.id).tags, tag}))
        if request.is_open:
            suspend_flow_run(key=uuid4().hex)  # another key each time: Prefect passes over one that has been resumed
    except (RlhfError, RuntimeError, HTTPError) as error:  # the request is in the history all the same
        get_run_logger().warning("this run ends instead of waiting for approval: %s", error)


def end_suspended_runs(workspace: Path, decision: PromotionDecision) -> int:
    """Complete the runs that were suspended until ``decision``; returns how many.

    Raises:
        RlhfError: The Prefect server does not answer.
    """
    with known_server(workspace) as client:
        if client is None:
            return 0
        name = "Approved" if decision.promoted else "Declined"
        message = f"version {decision.challenger} of {decision.model} was {decision.approval}"
        return _end_suspended(client, _tag(workspace, decision.model), Completed(name=name, message=message))


def _tag(workspace: Path, model: str) -> str:
    """The tag of runs that wait for a registered model: it names the history, for model names repeat across servers."""
    return f"{TAG}:{history_ledger(connect(workspace), model).run_id}"


def _end_suspended(client: SyncPrefectClient, tag: str, state: State[Any]) -> int:
    suspended = client.read_flow_runs(
        flow_run_filter=FlowRunFilter(
            tags=FlowRunFilterTags(all_=[tag]),
            state=FlowRunFilterState(name=FlowRunFilterStateName(any_=[SUSPENDED])),
        )
    )
    for run in suspended:
        client.set_flow_run_state(run.id, state, force=True)
    return len(suspended)
