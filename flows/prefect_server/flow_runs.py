"""Ending the flow runs of dead processes on the server, so that they hold no pool slot."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
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
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.states import Cancelled, Cancelling, Crashed, State

from flows.supervision.processes import start_token

ACTIVE = [StateType.RUNNING, StateType.PENDING, StateType.CANCELLING]
UNFINISHED = [StateType.RUNNING, StateType.PENDING, StateType.SCHEDULED, StateType.PAUSED]
SUSPENDED = "Suspended"
PAGE = 200


def end_stale_runs() -> int:
    """End the runs that an earlier life of the embedded server left behind; return how many.

    Begun runs become Crashed. Runs that were due but never began become Cancelled, since nobody wants yesterday's run
    at start-up. Future scheduled runs stay, and so do suspended ones, which wait for a person.
    """
    with get_client(sync_client=True) as client:
        ended = 0
        for run in _read_runs(client, [*ACTIVE, StateType.PAUSED, StateType.SCHEDULED]):
            state = _state_after_restart(run)
            if state is not None:
                client.set_flow_run_state(run.id, state, force=True)
                ended += 1
        return ended


def _state_after_restart(run: FlowRun) -> State[Any] | None:
    """Return the final state of a run whose server has ended, None if the run stays."""
    if run.state_type == StateType.SCHEDULED:
        due = run.next_scheduled_start_time or run.expected_start_time
        future = run.auto_scheduled and due is not None and due > datetime.now(UTC)
        return None if future else Cancelled(message="not started before its server ended")
    if run.state_name == SUSPENDED:
        return None
    return Crashed(message="its process died without reporting an outcome; ended at the next start")


def crash_pool_runs(pool: str, message: str, workspace: Path | None = None) -> int:
    """Mark the begun runs of ``pool`` as Crashed after a worker has died with them; return how many.

    Args:
        workspace: Only the jobs of this workspace whose processes are gone, on a server whose pool others use too; None
            for all, where the worker was the pool's only one.
    """
    with get_client(sync_client=True) as client:
        runs = _read_runs(client, ACTIVE, WorkPoolFilter(name=WorkPoolFilterName(any_=[pool])))
        if workspace is not None:
            runs = [run for run in runs if is_dead_job(run, workspace)]
        for run in runs:
            client.set_flow_run_state(run.id, Crashed(message=message), force=True)
        return len(runs)


def is_dead_job(run: FlowRun, workspace: Path) -> bool:
    """Whether ``run`` is a job of ``workspace`` without a process on this machine."""
    if run.parameters.get("workspace") != str(workspace):
        return False
    process = run.infrastructure_pid or ""
    return not (process.isdecimal() and start_token(int(process)) is not None)


def end_active_runs(cancelled: bool, message: str) -> int:
    """End every active run after its processes have ended: as Cancelled if a person stopped it, else as Crashed.

    Returns:
        How many runs were ended.
    """
    with get_client(sync_client=True) as client:
        runs = [run for run in _read_runs(client, [*ACTIVE, StateType.SCHEDULED]) if not run.auto_scheduled]
        for run in runs:
            state: State[Any] = Cancelled(message=message) if cancelled else Crashed(message=message)
            client.set_flow_run_state(run.id, state, force=True)
        return len(runs)


def _read_runs(client: SyncPrefectClient, types: list[StateType], pool: WorkPoolFilter | None = None) -> list[FlowRun]:
    states = FlowRunFilterState(type=FlowRunFilterStateType(any_=types))
    runs: list[FlowRun] = []
    while True:
        page = client.read_flow_runs(
            flow_run_filter=FlowRunFilter(state=states),
            work_pool_filter=pool,
            sort=FlowRunSort.ID_DESC,
            limit=PAGE,
            offset=len(runs),
        )
        runs += page
        if len(page) < PAGE:
            return runs


def cancel_children(parent: UUID) -> list[FlowRun]:
    """Cancel every unfinished flow run that the run ``parent`` started, and return them."""
    with get_client(sync_client=True) as client:
        children = client.read_flow_runs(
            flow_run_filter=FlowRunFilter(
                parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[parent]),
                state=FlowRunFilterState(type=FlowRunFilterStateType(any_=UNFINISHED)),
            ),
            sort=FlowRunSort.ID_DESC,
            limit=PAGE,
        )
        for child in children:
            started = child.state_type in (StateType.RUNNING, StateType.PENDING)
            message = "the pipeline run that started this job has ended"
            client.set_flow_run_state(child.id, Cancelling(message=message) if started else Cancelled(message=message))
    return children


def cancel_orphans(flow: Any, flow_run: FlowRun, state: Any) -> None:
    """Flow hook (``on_crashed``, ``on_cancellation``, ``on_failure``): no job outlives its pipeline run."""
    cancel_children(flow_run.id)


ZOMBIES = "rlhf: runs without a heartbeat have crashed"
HEARTBEAT = "prefect.flow-run.heartbeat"
FINAL_EVENTS = {f"prefect.flow-run.{name}" for name in ("Completed", "Failed", "Cancelled", "Crashed")}


def zombie_automation(within: timedelta = timedelta(seconds=90)) -> AutomationCore:
    """Define the automation: a run that sent heartbeats, then neither one nor an end ``within`` that time, crashed."""
    message = f"no heartbeat for {within.total_seconds():.0f} s"
    return AutomationCore(
        name=ZOMBIES,
        description="Frees the pool slots of runs whose worker and process were both killed.",
        trigger=EventTrigger(
            after={HEARTBEAT},
            expect={HEARTBEAT, *FINAL_EVENTS},
            match={"prefect.resource.id": ["prefect.flow-run.*"]},
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=within,
        ),
        actions=[ChangeFlowRunState(state=StateType.CRASHED, name="Crashed", message=message, force=False)],
    )


def ensure_zombie_automation() -> None:
    """Create :func:`zombie_automation` on the server unless it exists."""
    with get_client(sync_client=True) as client:
        if not client.read_automations_by_name(ZOMBIES):
            client.create_automation(zombie_automation())


def try_zombie_automation() -> bool:
    """Try to create :func:`zombie_automation`; return False where the server accepts no automations."""
    try:
        ensure_zombie_automation()
    except httpx.HTTPStatusError:
        return False
    return True
