"""Flow runs on the server: their names, their cancellation, and the ends of dead ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import httpx
from prefect import runtime
from prefect.client.orchestration import get_client
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
from prefect.events.schemas.automations import Automation, AutomationCore, EventTrigger, Posture
from prefect.exceptions import PrefectException
from prefect.states import Cancelled, Cancelling, Crashed, State
from rich.markup import escape

from flows.supervision import signals
from flows.supervision.processes import start_token

ACTIVE = [StateType.RUNNING, StateType.PENDING, StateType.CANCELLING]
UNFINISHED = [StateType.RUNNING, StateType.PENDING, StateType.SCHEDULED, StateType.PAUSED]
SUSPENDED = "Suspended"
PAGE = 200
WATCH_SECONDS = 10.0


def given_name() -> str:
    """The name that whoever created the present flow run has given it, or it has itself; empty for
    one of Prefect's.
    """
    name = str(runtime.flow_run.name or "")
    adjective, _, noun = name.partition("-")
    generated = adjective in _words("adj_any") and noun in _words("subj")
    return "" if generated else name


@cache
def _words(kind: str) -> frozenset[str]:
    """The words that Prefect makes names of, which are an adjective and a noun."""
    from coolname.data import config

    entry = cast("dict[str, Any]", config[kind])
    if "words" in entry:
        return frozenset(entry["words"])
    return frozenset().union(*(_words(part) for part in entry["lists"]))


def told(state: State[Any]) -> State[Any]:
    """Return the final state of this flow run; an event tells before why it failed.

    Who watches a run, as `prefect deployment run --watch` does, is shown the names of its events,
    and its log only by servers that stream logs. The watch ends with the event of the state.
    """
    run_id, reason = runtime.flow_run.id, (state.message or "").strip().partition("\n")[0]
    if run_id is None or not state.is_failed() or not reason:
        return state
    event = {
        "id": str(uuid4()),
        "event": "rlhf.run.failed",
        "occurred": datetime.now(UTC).isoformat(),
        "resource": {
            "prefect.resource.id": f"rlhf.flow-run.{run_id}",
            # The watcher takes words in brackets for colours.
            "prefect.resource.name": escape(reason),
        },
        "related": [
            {
                "prefect.resource.id": f"prefect.flow-run.{run_id}",
                "prefect.resource.role": "flow-run",
            }
        ],
        "payload": {"state": state.name, "reason": reason},
    }
    # The state, which follows, says the same.
    with suppress(httpx.HTTPError), get_client(sync_client=True) as client:
        client.request("POST", "/events", json=[event]).raise_for_status()
    return state


@contextmanager
def stopped_on_cancellation() -> Iterator[None]:
    """Raise the stop flag in the block once the server cancels this flow run.

    A process worker stops its runs faster, but only until three of its requests have failed: half a
    minute without the server ends that for every run of its. Runs without a worker, as of
    `rlhf run`, are stopped by this alone.
    """
    ended, run_id = threading.Event(), runtime.flow_run.id

    def watch() -> None:
        while not ended.wait(WATCH_SECONDS):
            try:
                with get_client(sync_client=True) as client:
                    state = client.read_flow_run(run_id).state
            except (httpx.HTTPError, PrefectException):  # no server for now, or the run was deleted
                continue
            if state is not None and (state.is_cancelling() or state.is_cancelled()):
                signals.STOP.set()

    threading.Thread(target=watch, name="cancellation", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def end_runs(
    types: list[StateType],
    state_of: Callable[[FlowRun], State[Any] | None],
    pool: str | None = None,
) -> int:
    """End the runs in a state of ``types``, of one work pool or all, that ``state_of`` gives one;
    return how many.
    """
    states = FlowRunFilterState(type=FlowRunFilterStateType(any_=types))
    of_pool = None if pool is None else WorkPoolFilter(name=WorkPoolFilterName(any_=[pool]))
    runs: list[FlowRun] = []
    with get_client(sync_client=True) as client:
        page = None
        while page is None or len(page) == PAGE:
            page = client.read_flow_runs(
                flow_run_filter=FlowRunFilter(state=states),
                work_pool_filter=of_pool,
                sort=FlowRunSort.ID_DESC,
                limit=PAGE,
                offset=len(runs),
            )
            runs += page
        ends = [(run, state) for run in runs if (state := state_of(run)) is not None]
        for run, state in ends:
            client.set_flow_run_state(run.id, state, force=True)
    return len(ends)


def end_stale_runs() -> int:
    """End the runs that an earlier life of the embedded server left behind; return how many.

    Begun runs become Crashed. Runs that were due but never began become Cancelled, since nobody
    wants yesterday's run at start-up. Future scheduled runs stay, and so do suspended ones, which
    wait for a person.
    """

    def state_after_restart(run: FlowRun) -> State[Any] | None:
        if run.state_type == StateType.SCHEDULED:
            due = run.next_scheduled_start_time or run.expected_start_time
            future = run.auto_scheduled and due is not None and due > datetime.now(UTC)
            return None if future else Cancelled(message="not started before its server ended")
        if run.state_name == SUSPENDED:
            return None
        return Crashed(
            message="its process died without reporting an outcome; ended at the next start"
        )

    return end_runs([*ACTIVE, StateType.PAUSED, StateType.SCHEDULED], state_after_restart)


def crash_pool_runs(pool: str, message: str, workspace: Path | None = None) -> int:
    """Mark the begun runs of ``pool`` as Crashed after a worker has died with them; return how
    many.

    Args:
        workspace: Only the jobs of this workspace whose processes are gone, on a server whose pool
            others use too; None for all, where the worker was the pool's only one.
    """

    def is_dead_job(run: FlowRun) -> bool:
        process = run.infrastructure_pid or ""
        runs_here = process.isdecimal() and start_token(int(process)) is not None
        return run.parameters.get("workspace") == str(workspace) and not runs_here

    return end_runs(
        ACTIVE,
        lambda run: Crashed(message=message) if workspace is None or is_dead_job(run) else None,
        pool,
    )


def cancel_orphans(flow: Any, flow_run: FlowRun, state: Any) -> None:
    """Flow hook (``on_crashed``, ``on_cancellation``, ``on_failure``): no job outlives its pipeline
    run.
    """
    message = "the pipeline run that started this job has ended"
    with get_client(sync_client=True) as client:
        children = client.read_flow_runs(
            flow_run_filter=FlowRunFilter(
                parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[flow_run.id]),
                state=FlowRunFilterState(type=FlowRunFilterStateType(any_=UNFINISHED)),
            ),
            sort=FlowRunSort.ID_DESC,
            limit=PAGE,
        )
        for child in children:
            started = child.state_type in (StateType.RUNNING, StateType.PENDING)
            client.set_flow_run_state(
                child.id, Cancelling(message=message) if started else Cancelled(message=message)
            )


ZOMBIES = "rlhf: runs without a heartbeat have crashed"
HEARTBEAT = "prefect.flow-run.heartbeat"
# What a run sends last: its end, or that it waits, for a person or for its turn, without a process.
LAST_EVENTS = {
    f"prefect.flow-run.{name}"
    for name in ("Completed", "Failed", "Cancelled", "Crashed", SUSPENDED, "AwaitingRetry")
}


# A server that is back decides before the heartbeats arrive that it has missed, so an outage must
# be shorter than this. So it must for leases, which Prefect gives for as long.
SILENCE = timedelta(minutes=5)


def zombie_automation(within: timedelta = SILENCE) -> AutomationCore:
    """Define the automation: a run whose heartbeats stop, with no last event ``within`` that time,
    has crashed.
    """
    message = f"no heartbeat for {within.total_seconds():.0f} s"
    return AutomationCore(
        name=ZOMBIES,
        description="Frees the pool slots of runs whose worker and process were both killed.",
        trigger=EventTrigger(
            after={HEARTBEAT},
            expect={HEARTBEAT, *LAST_EVENTS},
            match={"prefect.resource.id": ["prefect.flow-run.*"]},
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=within,
        ),
        actions=[
            ChangeFlowRunState(
                state=StateType.CRASHED, name="Crashed", message=message, force=False
            )
        ],
    )


def ensure_zombie_automation(report: Callable[[str], None]) -> None:
    """Create :func:`zombie_automation` on the server; one of other events or times is replaced.

    ``report`` is given a line where the server accepts no automations.
    """
    try:
        with get_client(sync_client=True) as client:
            # As `read_automations_by_name` does, whose request older servers refuse.
            named = {"automations": {"name": {"any_": [ZOMBIES]}}}
            answer = client.request("POST", "/automations/filter", json=named).json()
            standing = [Automation.model_validate(automation) for automation in answer]
            wanted = zombie_automation()
            if any(
                _waits_for(automation.trigger) == _waits_for(wanted.trigger)
                for automation in standing
            ):
                return
            client.create_automation(wanted)
            for automation in standing:
                client.delete_automation(automation.id)
    except httpx.HTTPStatusError as error:
        report(
            f"this Prefect server accepts no automations (HTTP {error.response.status_code}): a run "
            "whose machine dies keeps its pool slot"
        )


def _waits_for(trigger: Any) -> tuple[Any, Any]:
    """The events that a trigger expects, and for how long."""
    return getattr(trigger, "expect", None), getattr(trigger, "within", None)
