"""A stage on a work pool: the job that runs there, and submitting and awaiting it.

Where the pool's workers share the workspace (one machine, or NFS) the job runs in place, and its outcome is read from
there. Where they do not, ``flows.handoff`` says what goes to the job's host and what comes back.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect import flow, get_run_logger, runtime
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.states import Cancelled, Cancelling, Completed, Crashed, Failed, State

from flows import signals
from flows.deploy import JOB_FLOW
from flows.graph import StageNode
from flows.handoff import Correspondence, Handoff, failed, pack
from flows.outcome import Outcome, clear_outcome, load_outcome
from flows.stage_task import run_stage
from flows.submission import Job, claim, is_own
from flows.transfer import TransferFailed, TransferStopped
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
    handoff: dict[str, Any] | None = None,
) -> State[Any]:
    """One stage on a pool's worker. Fails when the stage does; a job that is stopped stops its stage first."""
    signals.install()
    if handoff is None:
        outcome = run_stage(Path(workspace), stage, tuple(outputs), environment, grace)
    else:
        from flows.remote_job import run_handed_over

        outcome = run_handed_over(Handoff(**handoff), stage, tuple(outputs), environment, grace)
    if outcome.ok:
        return Completed(message=f"{stage}: {outcome.action}")
    if outcome.action == "stopped":
        return _stopped(stage)
    return Failed(message=f"{stage}: {outcome.message}")


def _stopped(stage: str) -> State[Any]:
    """Cancelled if the server was asked for that; else the job lost its worker or machine, which is a crash."""
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(runtime.flow_run.id).state
    if state is not None and (state.is_cancelling() or state.is_cancelled()):
        return Cancelled(message=f"{stage}: stopped on request")
    return Crashed(message=f"{stage}: stopped by a signal from outside")


def hand_over(job: Job, node: StageNode, watch: Callable[[], None]) -> Outcome:
    """Like :func:`run_on_pool`, for a pool whose workers do not see the workspace."""
    started = time.time()
    try:
        packed = pack(job, node)
    except (TransferFailed, TransferStopped) as problem:
        return failed(job.stage, problem, f"cannot be handed over to {job.placement.pool}", started)
    if packed is None:
        return run_stage(job.workspace, job.stage, job.outputs, job.environment, job.grace)
    return run_on_pool(packed, watch)


def run_on_pool(job: Job, watch: Callable[[], None]) -> Outcome:
    """Submit ``job`` to its pool and wait; never raises for a failing stage. ``watch`` is called while waiting.

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
            if job.handoff is None:
                state = _await_end(client, run.id, watch, may_cancel=own)
            else:
                letters = Correspondence(job, client, run.id)
                state = _await_end(client, run.id, partial(letters.listen, watch), may_cancel=own)
                if own and not signals.STOP.is_set() and (outcome := letters.receive()) is not None:
                    return outcome
            if own or signals.STOP.is_set():
                return _outcome_of(job.workspace, job.stage, state, started)


def _await_end(
    client: SyncPrefectClient, job: UUID, watch: Callable[[], None], may_cancel: bool = True
) -> State[Any] | None:
    """The job's final state; after a stop signal its cancellation, if ``may_cancel``, is waited for briefly."""
    while True:
        state = client.read_flow_run(job).state
        if state is not None and state.is_final():
            return state
        if signals.STOP.wait(POLL_SECONDS):
            return cancel_and_wait(client, job) if may_cancel else state
        watch()


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
