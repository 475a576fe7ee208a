"""Runs of a schedule that came due while none could start: the one that runs now does the work of all of them."""

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
    """Cancel the runs of this run's schedule that are due and have not begun; a server that refuses keeps them.

    They pile up while the server is down, a run takes longer than the schedule's interval, or the clock jumps.
    """
    with contextlib.suppress(httpx.HTTPError):
        _drop()


def _drop() -> None:
    with get_client(sync_client=True) as client:
        run = client.read_flow_run(runtime.flow_run.id)
        if not run.auto_scheduled or run.deployment_id is None:
            return
        planned = client.read_flow_runs(
            flow_run_filter=FlowRunFilter(
                deployment_id=FlowRunFilterDeploymentId(any_=[run.deployment_id]),
                state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.SCHEDULED])),
            ),
            sort=FlowRunSort.NEXT_SCHEDULED_START_TIME_ASC,
            limit=200,
        )
        for late in [late for late in planned if late.auto_scheduled and late.start_time is None]:
            if late.next_scheduled_start_time is None or late.next_scheduled_start_time > datetime.now(UTC):
                break
            client.set_flow_run_state(late.id, Cancelled(message=f"overdue: {run.name} does its work"))
