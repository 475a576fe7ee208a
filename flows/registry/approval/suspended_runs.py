"""Prefect flow runs that wait for approval: suspended, without a process or a pool slot, until it is decided."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import uuid4

from httpx import HTTPError
from prefect import get_run_logger
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateName,
    FlowRunFilterTags,
)
from prefect.context import FlowRunContext
from prefect.flow_runs import suspend_flow_run
from prefect.states import Cancelled, Completed, State

from flows.prefect_server.flow_runs import SUSPENDED
from flows.prefect_server.services import known_server
from flows.registry.approval.request import latest_request
from flows.registry.governance.history import history_ledger, read_history
from flows.registry.mlflow_client import connect
from flows.registry.transactions.decisions import PromotionDecision
from rlhf_core.errors import RlhfError

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
