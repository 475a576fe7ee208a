"""What must happen on the server when a run ends badly: children are cancelled, the dead do not hold slots."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterParentFlowRunId,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.states import Cancelled, Cancelling

UNFINISHED = [StateType.RUNNING, StateType.PENDING, StateType.SCHEDULED, StateType.PAUSED]
ZOMBIES = "rlhf: runs without a heartbeat have crashed"
HEARTBEAT = "prefect.flow-run.heartbeat"
FINAL_EVENTS = {f"prefect.flow-run.{name}" for name in ("Completed", "Failed", "Cancelled", "Crashed")}


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


def zombie_automation(within: timedelta = timedelta(seconds=90)) -> AutomationCore:
    """Runs that sent heartbeats and then neither a heartbeat nor an end for ``within`` become Crashed."""
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
    """Create :func:`zombie_automation` on the server, once."""
    with get_client(sync_client=True) as client:
        if not client.read_automations_by_name(ZOMBIES):
            client.create_automation(zombie_automation())


def has_zombie_automation() -> bool:
    """Whether somebody else's server has :func:`zombie_automation`, after trying to create it; some refuse any."""
    try:
        ensure_zombie_automation()
    except httpx.HTTPStatusError:
        return False
    return True
