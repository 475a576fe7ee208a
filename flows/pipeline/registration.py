"""Registration, promotion and the wait for its approval as Prefect knows them: tasks, and the flow of a promotion."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

from httpx import HTTPError
from prefect import flow, get_run_logger, runtime, task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateName, FlowRunFilterTags
from prefect.context import FlowRunContext
from prefect.flow_runs import suspend_flow_run
from prefect.states import Cancelled, Completed, State

from flows.prefect_server.flow_runs import SUSPENDED
from flows.prefect_server.services import known_server
from flows.registry.client import connect
from flows.registry.decisions import PromotionDecision, as_report
from flows.registry.history import history_ledger, latest_request, read_history
from flows.registry.promote import promote
from flows.registry.register import register
from flows.registry.release_page import try_release_page
from rlhf_core.config.loading import load_params, load_section
from rlhf_core.config.operations import RegistryConfig
from rlhf_core.errors import RlhfError

MATCH_LOG = "match"
APPROVAL_TAG = "rlhf-approval"


@dataclass(frozen=True)
class RegistrationSummary:
    """One line on what was registered and what was refused, and the version of the policy that may be promoted."""

    message: str
    challenger: str | None


@task(name="register", task_run_name="register", persist_result=False, cache_policy=NO_CACHE)
def register_task(workspace: Path, run_id: str | None = None) -> RegistrationSummary:
    """Register the models of the workspace that passed their gates."""
    result = register(workspace, run_id)
    return RegistrationSummary(result.describe(), result.challenger(load_params(workspace).registry.policy))


@task(name="promote", task_run_name="promote", persist_result=False, cache_policy=NO_CACHE)
def promote_task(workspace: Path, version: str) -> PromotionDecision:
    """Decide on the version that this run registered, whatever has become challenger from elsewhere since."""
    return promote(workspace, version=version)


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
        tag = _approval_tag(workspace, decision.model)
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
        return _end_suspended(client, _approval_tag(workspace, decision.model), Completed(name=name, message=message))


def _approval_tag(workspace: Path, model: str) -> str:
    """The tag of runs that wait for a registered model: it names the history, for model names repeat across servers."""
    return f"{APPROVAL_TAG}:{history_ledger(connect(workspace), model).run_id}"


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


def _run_name() -> str:
    workspace = Path(runtime.flow_run.parameters["workspace"])
    return f"{workspace.name} · promotion · {datetime.now():%Y-%m-%d %H:%M:%S}"


@flow(name="rlhf-promotion", flow_run_name=_run_name, persist_result=False)
def promotion_flow(workspace: str, approval: bool = False) -> dict[str, Any]:
    """Promote the challenger of ``workspace`` if it beats the champion.

    With ``registry.approval``, or ``approval`` here, a challenger that passes is not promoted: the run suspends, which
    ends its process, and ``rlhf approve`` or ``rlhf decline`` completes it.
    """
    folder = Path(workspace).resolve()
    decision = promote(folder, approval=approval)
    get_run_logger().info("version %s against %s: %s", decision.challenger, decision.champion, decision.describe())
    if problem := try_release_page(folder):
        get_run_logger().warning(problem)
    if approval or load_section(folder, "registry", RegistryConfig).approval:
        follow_request(folder, decision)
    return as_report(decision)
