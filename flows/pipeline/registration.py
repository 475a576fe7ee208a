"""Registration, promotion and the wait for its approval as Prefect knows them: tasks, and the flow of a promotion."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from httpx import HTTPError
from prefect import flow, get_run_logger, runtime, task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateName, FlowRunFilterTags
from prefect.context import FlowRunContext
from prefect.flow_runs import suspend_flow_run
from prefect.input import RunInput
from prefect.states import Cancelled, Completed, State
from pydantic import Field, model_validator

from flows.prefect_server.flow_runs import SUSPENDED
from flows.prefect_server.services import known_server
from flows.registry.client import connect
from flows.registry.decisions import PromotionDecision, as_report
from flows.registry.history import Ledger, latest_request, read_history
from flows.registry.promote import approve, decline, promote
from flows.registry.register import Registration, register
from flows.registry.release_page import try_release_page
from flows.registry.workspace import ACTOR_VARIABLE
from rlhf_core.config.loading import load_section
from rlhf_core.config.operations import RegistryConfig
from rlhf_core.errors import RlhfError

MATCH_LOG = "match"
APPROVAL_TAG = "rlhf-approval"


@task(name="register", task_run_name="register", persist_result=False, cache_policy=NO_CACHE)
def register_task(workspace: Path, run_id: str) -> Registration:
    """Register the models of the workspace that passed their gates."""
    return register(workspace, run_id)


@task(name="promote", task_run_name="promote", persist_result=False, cache_policy=NO_CACHE)
def promote_task(workspace: Path, version: str) -> PromotionDecision:
    """Decide on the version that this run registered, whatever has become challenger from elsewhere since."""
    return promote(workspace, version=version)


class Approval(RunInput):
    """What a person fills in to resume a run that waits for approval."""

    approve: bool = Field(description="Make the version champion; else it is refused.")
    decided_by: str = Field(min_length=1, description="Your name; it becomes part of the history.")
    reason: str = Field(default="", description="Recorded with the decision; a refusal needs one.")

    @model_validator(mode="after")
    def _refusal_has_a_reason(self) -> Approval:
        if not self.approve and not self.reason.strip():
            raise ValueError("a refusal needs a reason")
        return self

    def decide(self, workspace: Path, version: str | None = None) -> PromotionDecision:
        """Approve or refuse the version that waits, in the name of who decided.

        Raises:
            RlhfError: No version waits, it is not ``version``, or the registry has changed since it was judged.
        """
        os.environ[ACTOR_VARIABLE] = self.decided_by  # for the rest of this process, which does nothing else
        if self.approve:
            return approve(workspace, self.reason, version)
        return decline(workspace, self.reason, version)


def waited_for_approval(workspace: Path) -> bool:
    """Whether this flow run was suspended for an approval, and runs again because somebody has decided."""
    model = load_section(workspace, "registry", RegistryConfig).policy
    tags = runtime.flow_run.tags
    return any(tag.startswith(APPROVAL_TAG) for tag in tags) and _approval_tag(workspace, model) in tags


def follow_request(workspace: Path, decision: PromotionDecision) -> PromotionDecision:
    """Suspend this flow run until a person approves or refuses ``decision``; cancel earlier runs that wait in vain.

    Suspending ends the process of the run. When somebody fills in the form on the server, the flow runs again, comes
    here again, and the decision is carried out. Only a run of a deployment can be suspended; any other goes on to its
    end, and `rlhf approve` decides.

    Returns:
        The decision as it stands afterwards.

    Raises:
        RlhfError: What the person decided can no longer be done.
    """
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return decision
    run = context.flow_run
    try:
        request = latest_request(read_history(connect(workspace), decision.model))
        may_suspend = run.deployment_id is not None and run.parent_task_run_id is None
        if request is None or (request.is_open and not may_suspend):
            return decision
        tag = _approval_tag(workspace, decision.model)
        reason = f"superseded by {run.name}" if request.is_open else request.closed_because()
        with get_client(sync_client=True) as client:
            _end_suspended(client, tag, Cancelled(message=reason))
            if request.is_open:
                client.update_flow_run(run.id, tags=sorted({*client.read_flow_run(run.id).tags, tag}))
        if not request.is_open:
            return decision
        about = f"Version {request.challenger} of {decision.model} passed everything: {decision.reason}"
        # Prefect passes over the key of a request that has been answered, and gives the answer.
        answer = suspend_flow_run(
            wait_for_input=Approval.with_initial_data(description=about),
            key=str(uuid5(NAMESPACE_URL, f"{tag} {request.entry['time']}")),
        )
    except (RlhfError, RuntimeError, HTTPError) as error:  # the request is in the history all the same
        get_run_logger().warning("this run ends instead of waiting for approval: %s", error)
        return decision
    decided = answer.decide(workspace, request.challenger)
    _refresh_release_page(workspace)
    return decided


def _refresh_release_page(workspace: Path) -> None:
    if problem := try_release_page(workspace)[1]:
        get_run_logger().warning(problem)


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
    return f"{APPROVAL_TAG}:{Ledger.open(connect(workspace), model).run_id}"


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
    ends its process, until a person resumes it with a decision, or ``rlhf approve`` or ``rlhf decline`` completes it.
    """
    folder = Path(workspace).resolve()
    decision = promote(folder, approval=approval)
    get_run_logger().info("version %s against %s: %s", decision.challenger, decision.champion, decision.describe())
    _refresh_release_page(folder)
    if approval or load_section(folder, "registry", RegistryConfig).approval:
        decision = follow_request(folder, decision)
    return as_report(decision)
