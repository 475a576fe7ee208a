"""Late runs of a schedule: those that came due while none could start are cancelled in favour of the current one."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime

import httpx
from prefect import runtime
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.states import Cancelled


def cancel_late_runs() -> None:
    """Cancel the late scheduled runs of this run's deployment; ignore HTTP errors.

    Runs become late while the server is down, while a run takes longer than the schedule's interval, or when the clock
    jumps forward.
    """
    with contextlib.suppress(httpx.HTTPError), get_client(sync_client=True) as client:
        current = client.read_flow_run(runtime.flow_run.id)
        if not current.auto_scheduled or current.deployment_id is None:
            return
        scheduled = client.read_flow_runs(
            flow_run_filter=FlowRunFilter(
                deployment_id=FlowRunFilterDeploymentId(any_=[current.deployment_id]),
                state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.SCHEDULED])),
            ),
            sort=FlowRunSort.NEXT_SCHEDULED_START_TIME_ASC,
            limit=200,
        )
        for run in scheduled:
            if not run.auto_scheduled or run.start_time is not None:
                continue
            if run.next_scheduled_start_time is None or run.next_scheduled_start_time > datetime.now(UTC):
                break
            client.set_flow_run_state(run.id, Cancelled(message=f"late: superseded by {current.name}"))
