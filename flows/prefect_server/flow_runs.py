"""Putting flow runs of dead processes to rest on the server, so that they hold no slot."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterParentFlowRunId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.states import Cancelled, Cancelling, Crashed, State

ACTIVE = [StateType.RUNNING, StateType.PENDING, StateType.CANCELLING]


SUSPENDED = "Suspended"


def end_stale_runs() -> int:
    """End every run of an embedded server's earlier life; for a server that nobody else uses. Returns how many.

    What ran becomes Crashed. What was due but never began becomes Cancelled (nobody wants yesterday's run at start-up);
    future scheduled runs and suspended ones (waiting for a person) stay.
    """
    with get_client(sync_client=True) as client:
        ended = 0
        for run in _runs(client, [*ACTIVE, StateType.PAUSED, StateType.SCHEDULED]):
            state = _rest(run)
            if state is not None:
                client.set_flow_run_state(run.id, state, force=True)
                ended += 1
        return ended


def _rest(run: FlowRun) -> State[Any] | None:
    if run.state_type == StateType.SCHEDULED:
        due = run.next_scheduled_start_time or run.expected_start_time
        future = run.auto_scheduled and due is not None and due > datetime.now(UTC)
        return None if future else Cancelled(message="not begun before its server ended")
    if run.state_name == SUSPENDED:
        return None
    return Crashed(message="its process ended without a word; swept at the next start")


def crash_pool_runs(pool: str, message: str) -> int:
    """Mark the begun runs of ``pool`` as Crashed after its only worker, and all it started, has died."""
    with get_client(sync_client=True) as client:
        runs = _runs(client, ACTIVE, WorkPoolFilter(name=WorkPoolFilterName(any_=[pool])))
        for run in runs:
            client.set_flow_run_state(run.id, Crashed(message=message), force=True)
        return len(runs)


def end_active_runs(cancelled: bool, message: str) -> int:
    """Mark what is still active when its processes are gone: Cancelled if a person stopped it, else Crashed."""
    with get_client(sync_client=True) as client:
        runs = [run for run in _runs(client, [*ACTIVE, StateType.SCHEDULED]) if not run.auto_scheduled]
        for run in runs:
            state: State[Any] = Cancelled(message=message) if cancelled else Crashed(message=message)
            client.set_flow_run_state(run.id, state, force=True)
        return len(runs)


def _runs(client: SyncPrefectClient, types: list[StateType], pool: WorkPoolFilter | None = None) -> list[FlowRun]:
    states = FlowRunFilterState(type=FlowRunFilterStateType(any_=types))
    found: list[FlowRun] = []
    while True:
        page = client.read_flow_runs(
            flow_run_filter=FlowRunFilter(state=states),
            work_pool_filter=pool,
            sort=FlowRunSort.ID_DESC,
            limit=200,
            offset=len(found),
        )
        found += page
        if len(page) < 200:
            return found


UNFINISHED = [StateType.RUNNING, StateType.PENDING, StateType.SCHEDULED, StateType.PAUSED]


def cancel_children(parent: UUID) -> list[FlowRun]:
    """Ask for the end of every unfinished flow run that ``parent`` started. Returns them."""
    with get_client(sync_client=True) as client:
        children = client.read_flow_runs(
            flow_run_filter=FlowRunFilter(
                parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[parent]),
                state=FlowRunFilterState(type=FlowRunFilterStateType(any_=UNFINISHED)),
            ),
            sort=FlowRunSort.ID_DESC,
            limit=200,
        )
        for child in children:
            started = child.state_type in (StateType.RUNNING, StateType.PENDING)
            message = "the pipeline run that started this job has ended"
            client.set_flow_run_state(child.id, Cancelling(message=message) if started else Cancelled(message=message))
    return children


def cancel_orphans(flow: Any, flow_run: FlowRun, state: Any) -> None:
    """Hook for ``on_crashed``, ``on_cancellation`` and ``on_failure``: a job does not outlive its pipeline run."""
    cancel_children(flow_run.id)
