"""Registration, promotion and the wait for its approval, as tasks and a flow of Prefect."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

from httpx import HTTPError
from prefect import flow, get_run_logger, runtime, task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateName
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.sorting import FlowRunSort
from prefect.context import FlowRunContext
from prefect.flow_runs import suspend_flow_run
from prefect.input import RunInput
from prefect.states import Cancelled, Completed, Failed, State
from pydantic import ConfigDict, Field

from flows.pipeline.events import failed_state
from flows.prefect_server.flow_runs import PAGE, SUSPENDED, given_name, told
from flows.prefect_server.services import known_server
from flows.registry.decisions import PromotionDecision, registry_session
from flows.registry.history import APPROVE, DECLINE, Entry, ReleaseState
from flows.registry.promote import approve, decline, promote
from flows.registry.register import register
from flows.registry.release_page import try_release_page
from flows.workspace import ACTOR_VARIABLE
from rlhf_core.config.loading import load_section
from rlhf_core.config.operations import RegistryConfig
from rlhf_core.errors import RlhfError

MATCH_LOG = "match"
ANSWER_SECONDS, POLL_SECONDS = 300.0, 0.5
LOGGER = logging.getLogger(__name__)


register_task = task(
    name="register", task_run_name="register", persist_result=False, cache_policy=NO_CACHE
)(register)
promote_task = task(
    name="promote", task_run_name="promote", persist_result=False, cache_policy=NO_CACHE
)(promote)


class Approval(RunInput):
    """What a person, or ``rlhf approve`` and ``decline``, fill in to resume a waiting run.

    A server that is told to refuse without a reason rejects the form, and the run goes on waiting.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "if": {"properties": {"approve": {"const": False}}},
            "then": {"properties": {"reason": {"pattern": r"\S"}}, "required": ["reason"]},
        }
    )

    approve: bool = Field(description="Make the version champion; else it is refused.")
    decided_by: str = Field(min_length=1, description="Your name; it becomes part of the history.")
    reason: str = Field(default="", description="Recorded with the decision; a refusal needs one.")

    def decide(self, workspace: Path, version: str) -> PromotionDecision:
        """Approve or refuse the version that waits, in the name of who decided.

        Raises:
            RlhfError: No version waits, it is not ``version``, or the registry has changed since it
                was judged.
        """
        # For the rest of this process, which does nothing else.
        os.environ[ACTOR_VARIABLE] = self.decided_by
        decide = approve if self.approve else decline
        return decide(workspace, self.reason, version)


def was_suspended() -> bool:
    """Whether this flow run has waited for an approval, and somebody has decided."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return False
    return bool(context.flow_run.empirical_policy.pause_keys)


def follow_request(workspace: Path) -> State[Any]:
    """Suspend this flow run until a person decides on the version that waits.

    Earlier runs that wait in vain are cancelled. Suspending ends the process of the run. When
    somebody fills in the form on the server, the flow runs again, comes here again, and the
    decision is carried out. Only a run of a deployment can be suspended; any other goes on to its
    end, and `rlhf approve` decides.

    Returns:
        What has become of the request, as the final state of a run that has nothing else to do.
    """
    context = FlowRunContext.get()
    assert context is not None and context.flow_run is not None
    run = context.flow_run
    try:
        state = ReleaseState.of(workspace)
        request = state.request
        if request is None:
            return Completed(message=f"no version of {state.name} waits for approval")
        may_suspend = run.deployment_id is not None and run.parent_task_run_id is None
        with get_client(sync_client=True) as client:
            for other in _waiting_runs(client, state.entries):
                if request.is_open and _waits_for(other, request.entry) and not may_suspend:
                    continue
                reason = f"superseded by {run.name}"
                if not request.is_open:
                    reason = request.closed_because()
                client.set_flow_run_state(other.id, Cancelled(message=reason), force=True)
        if not request.is_open:
            return Completed(message=request.closed_because())
        if not may_suspend:
            message = f"version {request.challenger} of {state.name} waits for approval"
            return Completed(message=message)
        about = f"Version {request.challenger} of {state.name} passed everything: {request.entry['reason']}"
        # Prefect passes over the key of a request that has been answered, and gives the answer.
        answer = suspend_flow_run(
            wait_for_input=Approval.with_initial_data(description=about), key=request.entry["id"]
        )
    except (RlhfError, RuntimeError, HTTPError) as error:
        # The request is in the history all the same.
        get_run_logger().warning("this run ends instead of waiting for approval: %s", error)
        return Completed(message=f"ended instead of waiting for approval: {error}")
    try:
        decision = answer.decide(workspace, request.challenger)
    except RlhfError as error:
        return Failed(message=str(error))
    _refresh_release_page(workspace)
    return Completed(message=decision.describe())


def _refresh_release_page(workspace: Path) -> None:
    if problem := try_release_page(workspace)[1]:
        get_run_logger().warning(problem)


def _waiting_runs(client: SyncPrefectClient, requests: Sequence[Entry]) -> list[FlowRun]:
    """The runs on the server that are suspended until a person answers one of ``requests``."""
    suspended = FlowRunFilterState(name=FlowRunFilterStateName(any_=[SUSPENDED]))
    runs = client.read_flow_runs(
        flow_run_filter=FlowRunFilter(state=suspended),
        sort=FlowRunSort.START_TIME_DESC,
        limit=PAGE,
    )
    waiting = []
    for run in runs:
        if any(_waits_for(run, request) for request in requests):
            waiting.append(run)
    return waiting


def _waits_for(run: FlowRun, request: Entry) -> bool:
    return run.state is not None and run.state.state_details.pause_key == request["id"]


def answer_request(workspace: Path, answer: Approval, version: str | None) -> str:
    """Decide on the version that waits for approval: by the form of its run, else here.

    A Prefect server that does not answer stops no decision: its run ends as soon as somebody
    resumes it.

    Args:
        version: The version that the person has looked at, None for the one that waits.

    Returns:
        What was decided, in one line.

    Raises:
        RlhfError: No version waits, it is another one, the registry has changed since it was
            judged, or the run does not carry the answer out.
    """
    with registry_session(workspace) as state:
        request = state.open_request(version)
    run: FlowRun | None = None
    try:
        with known_server(workspace) as client:
            if client is not None and (waiting := _waiting_runs(client, [request.entry])):
                client.resume_flow_run(waiting[0].id, run_input=answer.model_dump())
                run = _ended(client, waiting[0].id)
    except RlhfError as error:
        LOGGER.warning("a Prefect run that waits for it may stay suspended: %s", error)
    if run is None:
        reason = answer.decide(workspace, request.challenger).reason
    else:
        latest = ReleaseState.of(workspace).request
        decided = latest.followed_by if latest is not None else None
        if decided is None or decided["action"] != (APPROVE if answer.approve else DECLINE):
            ended = "" if run.state is None else f"{run.state.name}: {run.state.message}"
            raise RlhfError(
                f"the Prefect run {run.name} has the answer and has not carried it out ({ended}); `rlhf status` shows "
                "what was decided, and one that has not begun needs a worker"
            )
        reason = decided["reason"]
    return f"version {request.challenger} {'is champion' if answer.approve else 'is not promoted'}: {reason}"


def _ended(client: SyncPrefectClient, run_id: UUID) -> FlowRun:
    """Wait until the run has ended, or for five minutes."""
    deadline = time.monotonic() + ANSWER_SECONDS
    while True:
        run = client.read_flow_run(run_id)
        if (run.state is not None and run.state.is_final()) or time.monotonic() > deadline:
            return run
        time.sleep(POLL_SECONDS)


def _run_name() -> str:
    if given := given_name():
        return given
    workspace = Path(runtime.flow_run.parameters["workspace"])
    return f"{workspace.name} · promotion · {datetime.now():%Y-%m-%d %H:%M:%S}"


@flow(name="rlhf-promotion", flow_run_name=_run_name, persist_result=False)
def promotion_flow(workspace: str, approval: bool = False) -> State[Any]:
    """Promote the challenger of ``workspace`` if it beats the champion.

    With ``registry.approval``, or ``approval`` here, a challenger that passes is not promoted: the
    run suspends, which ends its process, until a person fills in its form on the server or by
    ``rlhf approve`` or ``rlhf decline``.

    Args:
        workspace: The workspace's folder, as the worker sees it.
        approval: Let a person decide on a challenger that passes, also where params.yaml asks for
            nobody.
    """
    folder = Path(workspace).resolve()
    if was_suspended():
        return told(follow_request(folder))
    try:
        decision = promote(folder, approval=approval)
    except RlhfError as error:
        return told(failed_state(error.exit_code, str(error)))
    get_run_logger().info(
        "version %s against %s: %s", decision.challenger, decision.champion, decision.describe()
    )
    _refresh_release_page(folder)
    if approval or load_section(folder, "registry", RegistryConfig).approval:
        follow_request(folder)
    return Completed(message=decision.describe())
