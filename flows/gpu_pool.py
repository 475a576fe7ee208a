"""A stage on a work pool: the job that runs there, and submitting and awaiting it.

The pool's workers share the workspace (one machine, or NFS): the job runs in place, and its outcome is read from there.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect import flow, get_run_logger, runtime
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import Abort, TerminationSignal
from prefect.states import AwaitingRetry, Cancelled, Cancelling, Completed, Failed, State

from flows import signals
from flows.deploy import JOB_FLOW
from flows.outcome import Outcome, clear_outcome, load_outcome
from flows.stage_task import run_stage
from flows.submission import Job, claim, is_own
from rlhf_core.errors import EXIT_INTERRUPTED

POLL_SECONDS = 0.5
CANCEL_SECONDS = 6.0


@flow(name=JOB_FLOW, flow_run_name="{stage}", persist_result=False, validate_parameters=True)
def stage_job(
    workspace: str,
    stage: str,
    outputs: list[str],
    environment: dict[str, str],
    grace: float = 5.0,
    preemptions: int = 100,
) -> State[Any]:
    """One stage on a pool's worker. Fails when the stage does; a job that is stopped stops its stage first.

    A job that loses its place (its worker or machine is told to stop, or its stage alone is) goes back to the queue of
    its pool, at most ``preemptions`` times; the stage goes on from what it has saved.
    """
    # SIGTERM is Prefect's: whoever supervises this process first says by a channel of its own what it wants by that.
    signals.install(signal.SIGINT, signal.SIGHUP)
    try:
        outcome = run_stage(Path(workspace), stage, tuple(outputs), environment, grace)
    except TerminationSignal:
        return _given_back(stage, "stopped by a signal from outside", preemptions)
    if outcome.ok:
        return Completed(message=f"{stage}: {outcome.action}")
    if outcome.action == "stopped":
        return _given_back(stage, "stopped by a signal from outside", preemptions)
    if outcome.preempted:
        return _given_back(stage, outcome.message, preemptions)
    return Failed(message=f"{stage}: {outcome.message}")


def _given_back(stage: str, why: str, preemptions: int) -> State[Any]:
    """Put this job back into the queue, which ends this process (``Abort``), unless somebody has decided otherwise:
    Cancelled if the server was asked for that, Failed after too many preemptions."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a worker that shuts down tells its job once more
    with get_client(sync_client=True) as client:
        run = client.read_flow_run(runtime.flow_run.id)
        state = run.state
        if state is not None and (state.is_cancelling() or state.is_cancelled()):
            return Cancelled(message=f"{stage}: stopped on request")
        if run.run_count > preemptions:
            return Failed(message=f"{stage}: preempted {run.run_count} times, more than flow.max_preemptions; {why}")
        if state is None or not state.is_scheduled():  # else whoever supervises this process has done it
            client.set_flow_run_state(run.id, AwaitingRetry(message=f"{stage} was preempted: {why}"))
    raise Abort(f"{stage} goes back to the queue")


def run_on_pool(job: Job, watch: Callable[[], None], tell: Callable[[str], None] = lambda text: None) -> Outcome:
    """Submit ``job`` to its pool and wait; never raises for a failing stage. ``watch`` is called while waiting, and
    ``tell`` when the job has lost its place.

    When another workspace with the same DVC cache is computing the same, that is waited for first: this job then finds
    the result in the cache. Should the other one fail or be stopped, this job does the work.
    """
    clear_outcome(job.workspace, job.stage)
    started = time.time()
    with get_client(sync_client=True) as client:
        while True:
            run = claim(client, job)
            own = is_own(run, job)
            if not own:
                place = run.parameters.get("workspace")
                get_run_logger().info("%s: %s computes the same (flow run %s); waiting", job.stage, place, run.id)
            state = _await_end(client, run.id, watch, tell, may_cancel=own)
            if own or signals.STOP.is_set():
                return _outcome_of(job.workspace, job.stage, state, started)


def _await_end(
    client: SyncPrefectClient,
    job: UUID,
    watch: Callable[[], None],
    tell: Callable[[str], None],
    may_cancel: bool = True,
) -> State[Any] | None:
    """The job's final state; after a stop signal its cancellation, if ``may_cancel``, is waited for briefly."""
    seen = 0
    while True:
        run = client.read_flow_run(job)
        state = run.state
        if state is not None and state.is_final():
            return state
        if (lost := preemptions_of(run)) > seen:
            seen = lost
            waiting = state is not None and state.is_scheduled()
            tell("preempted, waiting for a worker" if waiting else "preempted, goes on with another worker")
        if signals.STOP.wait(POLL_SECONDS):
            return cancel_and_wait(client, job) if may_cancel else state
        watch()


def preemptions_of(run: FlowRun) -> int:
    """How often an unfinished job has begun and gone back to the queue."""
    runs_now = run.state is not None and (run.state.is_running() or run.state.is_cancelling())
    return run.run_count - int(runs_now)


def cancel_and_wait(client: SyncPrefectClient, job: UUID, seconds: float = CANCEL_SECONDS) -> State[Any] | None:
    """Cancel a job: at once if no worker has it, else by asking its worker. Its state after at most ``seconds``."""
    state = client.read_flow_run(job).state
    if state is not None and state.is_scheduled():
        client.set_flow_run_state(job, Cancelled(message="the pipeline run was stopped"))
    elif state is not None and not state.is_final():
        client.set_flow_run_state(job, Cancelling(message="the pipeline run was stopped"))
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        state = client.read_flow_run(job).state
        if state is not None and state.is_final():
            break
        time.sleep(0.2)
    return state


def _outcome_of(workspace: Path, stage: str, state: State[Any] | None, started: float) -> Outcome:
    """What the job wrote; if it died before that, what the server says of it."""
    ended = time.time()
    if signals.STOP.is_set():
        return Outcome(stage, "stopped", EXIT_INTERRUPTED, "stopped", started, ended, 0.0)
    written = load_outcome(workspace, stage)
    if state is not None and state.is_cancelled():
        return Outcome(stage, "failed", EXIT_INTERRUPTED, "its job on the pool was cancelled", started, ended, 0.0)
    if (
        written is not None
        and written.action != "stopped"
        and (written.ok == (state is not None and state.is_completed()))
    ):
        return written
    name = state.name if state else "lost"
    detail = state.message.split(". ")[0] if state and state.message else ""
    message = f"its job on the pool ended as {name}" + (f": {detail}" if detail else "")
    return Outcome(stage, "failed", 1, message, started, ended, ended - started)
