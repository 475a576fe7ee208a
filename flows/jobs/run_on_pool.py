"""Submit a stage to a work pool, wait for its job and return its outcome; a preempted job is submitted again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect import get_run_logger
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.states import Cancelled, Cancelling, State

from flows.dvc_repo.graph import StageNode
from flows.jobs.job import Job
from flows.jobs.remote_client import RemoteJobClient, failed, prepare_remote_job
from flows.jobs.stage_job import PREEMPTED, preempted
from flows.jobs.submission import claim, is_own_run
from flows.jobs.transfer import TransferFailed, TransferStopped
from flows.stage.outcome import StageOutcome, clear_outcome, load_outcome, stage_report
from flows.stage.run import run_stage
from flows.supervision import signals
from rlhf_core.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED

POLL_SECONDS = 0.5
CANCEL_SECONDS = 6.0
REPORT_POLLS = 10


def run_on_remote_pool(
    job: Job, node: StageNode, watch: Callable[[], None], tell: Callable[[str], None]
) -> StageOutcome:
    """Like :func:`run_on_pool`, for a pool whose workers do not see the workspace."""
    started = time.time()
    try:
        packed = prepare_remote_job(job, node)
    except (TransferFailed, TransferStopped) as problem:
        return failed(job.stage, problem, f"cannot be handed over to {job.placement.pool}", started)
    if packed is None:
        return run_stage(job.workspace, job.stage, job.outputs, job.environment, job.grace)
    return run_on_pool(packed, watch, tell)


def run_on_pool(job: Job, watch: Callable[[], None], tell: Callable[[str], None] = lambda text: None) -> StageOutcome:
    """Submit ``job`` to its pool and wait; never raises for a failing stage. ``watch`` is called while waiting, and
    ``tell`` when the job has lost its place, upon which it is submitted again.

    When another workspace with the same DVC cache is computing the same, that is waited for first: this job then finds
    the result in the cache. Should the other one fail or be stopped, this job does the work.
    """
    started = time.time()
    lost = 0
    with get_client(sync_client=True) as client:
        while True:
            clear_outcome(job.workspace, job.stage)
            run = claim(client, replace(job, attempt=f"{job.attempt}:{lost}" if lost else job.attempt))
            own = is_own_run(run, job)
            if not own:
                place = run.parameters.get("workspace")
                get_run_logger().info("%s: %s computes the same (flow run %s); waiting", job.stage, place, run.id)
            letters = RemoteJobClient(job, client, run.id) if job.handoff is not None else None
            heard = partial(letters.listen, watch) if letters is not None else watch
            state = _await_end(client, run.id, heard, job if own else None)
            if own and _lost_its_place(job, state) and not signals.STOP.is_set():
                lost += 1
                if lost > job.preemptions:
                    return _preempted_too_often(job, started)
                tell("preempted, waiting for a worker")
                continue
            if own and letters is not None and not signals.STOP.is_set() and (outcome := letters.receive()) is not None:
                return outcome
            if own or signals.STOP.is_set():
                return _outcome_of(job.workspace, job.stage, state, started)


def _await_end(client: SyncPrefectClient, run: UUID, watch: Callable[[], None], own: Job | None) -> State[Any] | None:
    """The run's final state; after a stop signal the cancellation of an ``own`` job is waited for briefly.

    An own job whose stage has said that it was preempted has a while to end by itself. Its process may have died with
    its worker, and then the server would learn of that much later.
    """
    patience = REPORT_POLLS
    while True:
        state = client.read_flow_run(run).state
        if state is not None and state.is_final():
            return state
        if own is not None and _stage_has_left(own, state):
            patience -= 1
            if patience <= 0:
                client.set_flow_run_state(run, preempted(f"{own.stage}: its worker is gone"), force=True)
        if signals.STOP.wait(POLL_SECONDS):
            return cancel_and_wait(client, run) if own is not None else state
        watch()


def _stage_has_left(job: Job, state: State[Any] | None) -> bool:
    """Whether the stage was preempted since its job began to run."""
    if state is None or not state.is_running():
        return False
    spoken = stage_report(job.workspace, job.stage) or {}
    return spoken.get("exit_code") == EXIT_PREEMPTED and spoken.get("ended", 0.0) >= state.timestamp.timestamp()


def _lost_its_place(job: Job, state: State[Any] | None) -> bool:
    """Whether a job has ended because it was preempted, by its own word or, where it died before that, its stage's."""
    if state is None or state.is_completed() or state.is_cancelled():
        return False
    spoken = stage_report(job.workspace, job.stage) or {}
    return state.name == PREEMPTED or spoken.get("exit_code") == EXIT_PREEMPTED


def _preempted_too_often(job: Job, started: float) -> StageOutcome:
    message = f"preempted more than {job.preemptions} times (flow.max_preemptions); run again, it goes on"
    return StageOutcome(job.stage, "failed", EXIT_PREEMPTED, message, started, time.time(), 0.0)


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


def _outcome_of(workspace: Path, stage: str, state: State[Any] | None, started: float) -> StageOutcome:
    """What the job wrote; if it died before that, what the server says of it."""
    ended = time.time()
    if signals.STOP.is_set():
        return StageOutcome(stage, "stopped", EXIT_INTERRUPTED, "stopped", started, ended, 0.0)
    written = load_outcome(workspace, stage)
    if state is not None and state.is_cancelled():
        return StageOutcome(stage, "failed", EXIT_INTERRUPTED, "its job on the pool was cancelled", started, ended, 0.0)
    if (
        written is not None
        and written.action != "stopped"
        and (written.ok == (state is not None and state.is_completed()))
    ):
        return written
    name = state.name if state else "lost"
    detail = state.message.split(". ")[0] if state and state.message else ""
    message = f"its job on the pool ended as {name}" + (f": {detail}" if detail else "")
    return StageOutcome(stage, "failed", 1, message, started, ended, ended - started)
