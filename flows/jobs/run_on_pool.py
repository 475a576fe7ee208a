"""Submit a stage to a work pool and wait for its job; one that was preempted or never began is submitted again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from uuid import UUID

from prefect import get_run_logger
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.states import Cancelled, Cancelling, State

from flows.dvc_repo.graph import StageNode
from flows.jobs.job import Job
from flows.jobs.remote_client import RemoteJobClient, prepare_remote_job, transfer_outcome
from flows.jobs.stage_job import PREEMPTED, preempted_state
from flows.jobs.submission import claim_flow_run, is_own_run
from flows.jobs.transfer import TransferFailed
from flows.stage.outcome import StageOutcome, clear_outcome, load_outcome, load_report
from flows.stage.run import run_stage
from flows.supervision import signals
from flows.supervision.signals import StopRequested
from rlhf_core.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED

POLL_SECONDS = 0.5
CANCEL_SECONDS = 6.0
REPORT_POLLS = 10
FALSE_STARTS = 2


def run_on_remote_pool(
    job: Job, node: StageNode, on_poll: Callable[[], None], on_preempted: Callable[[str], None]
) -> StageOutcome:
    """Run :func:`run_on_pool` for a pool whose workers do not see the workspace."""
    started = time.time()
    try:
        remote_job = prepare_remote_job(job, node)
    except (TransferFailed, StopRequested) as error:
        context = f"the stage cannot be submitted to the work pool {job.placement.pool}"
        return transfer_outcome(job.stage, error, context, started)
    if remote_job is None:
        return run_stage(job.spec)
    return run_on_pool(remote_job, on_poll, on_preempted)


def run_on_pool(
    job: Job, on_poll: Callable[[], None], on_preempted: Callable[[str], None] = lambda message: None
) -> StageOutcome:
    """Submit ``job`` to its pool and return its outcome; a failing stage does not raise.

    If another workspace with the same DVC cache is computing the same, its job is waited for first, and this job then
    finds the result in the cache. If that job fails or is stopped, this one does the work.

    A job whose process ended before it began is submitted again, ``FALSE_STARTS`` times at most: a new process gives up
    at once where the server does not answer its first request.

    Args:
        on_poll: called while waiting.
        on_preempted: given a message each time the job is about to be submitted again.
    """
    started = time.time()
    preemptions = false_starts = 0
    with get_client(sync_client=True) as client:
        while True:
            clear_outcome(job.workspace, job.stage)
            repeats = preemptions + false_starts
            attempt = f"{job.attempt}:{repeats}" if repeats else job.attempt
            run = claim_flow_run(client, replace(job, attempt=attempt))
            if not is_own_run(run, job):
                workspace = run.parameters.get("workspace")
                get_run_logger().info("%s: %s computes the same (flow run %s); waiting", job.stage, workspace, run.id)
                _await_end(client, run.id, on_poll)
                if signals.STOP.is_set():
                    return StageOutcome.stopped(job.stage, started=started)
                continue
            remote = RemoteJobClient(job, client, run.id) if job.handoff is not None else None
            state = _await_end(client, run.id, on_poll, job, remote)
            if signals.STOP.is_set():
                return StageOutcome.stopped(job.stage, started=started)
            if _was_preempted(job, state):
                preemptions += 1
                if preemptions > job.max_preemptions:
                    message = f"preempted more than {job.max_preemptions} times (flow.max_preemptions); run it again"
                    return StageOutcome.failed(job.stage, f"{message} to resume", EXIT_PREEMPTED, started=started)
                on_preempted("preempted, waiting for a worker")
                continue
            if false_starts < FALSE_STARTS and _never_began(client, run.id, state):
                false_starts += 1
                on_preempted("its process ended before the job began, waiting for a worker")
                continue
            reported = remote.receive() if remote is not None else None
            return reported or _outcome_in_workspace(job, state, started)


def _await_end(
    client: SyncPrefectClient,
    run: UUID,
    on_poll: Callable[[], None],
    own: Job | None = None,
    remote: RemoteJobClient | None = None,
) -> State[Any] | None:
    """Wait for the run's final state. After a stop signal an ``own`` job is cancelled and waited for briefly.

    If the stage of an own job has reported its preemption, the job has a while to end by itself. Its process may have
    died with its worker, which the server would notice much later.
    """
    polls_left = REPORT_POLLS
    while True:
        state = client.read_flow_run(run).state
        if state is not None and state.is_final():
            return state
        if own is not None and _stage_reported_preemption(own, state):
            polls_left -= 1
            if polls_left <= 0:
                client.set_flow_run_state(run, preempted_state(f"{own.stage}: its worker is gone"), force=True)
        if signals.STOP.wait(POLL_SECONDS):
            return cancel_and_wait(client, run) if own is not None else state
        if remote is not None:
            remote.follow_log()
        on_poll()


def _stage_reported_preemption(job: Job, state: State[Any] | None) -> bool:
    """Whether the stage has reported its preemption since its job began to run."""
    report = load_report(job.workspace, job.stage)
    if report is None or state is None or not state.is_running():
        return False
    return report.exit_code == EXIT_PREEMPTED and report.ended >= state.timestamp.timestamp()


def _was_preempted(job: Job, state: State[Any] | None) -> bool:
    """Whether a job ended because of a preemption, by its own state or, if it died before that, its stage's report."""
    if state is None or state.is_completed() or state.is_cancelled():
        return False
    report = load_report(job.workspace, job.stage)
    return state.name == PREEMPTED or (report is not None and report.exit_code == EXIT_PREEMPTED)


def _never_began(client: SyncPrefectClient, run: UUID, state: State[Any] | None) -> bool:
    """Whether a job failed without having run for a moment, so that nothing of its stage was done."""
    failed = state is not None and (state.is_crashed() or state.is_failed())
    return failed and client.read_flow_run(run).run_count == 0


def cancel_and_wait(client: SyncPrefectClient, run: UUID, seconds: float = CANCEL_SECONDS) -> State[Any] | None:
    """Cancel a job, at once or through its worker if one has it; return its state after ``seconds`` at most."""
    state = client.read_flow_run(run).state
    if state is not None and state.is_scheduled():
        client.set_flow_run_state(run, Cancelled(message="the pipeline run was stopped"))
    elif state is not None and not state.is_final():
        client.set_flow_run_state(run, Cancelling(message="the pipeline run was stopped"))
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        state = client.read_flow_run(run).state
        if state is not None and state.is_final():
            break
        time.sleep(0.2)
    return state


def _outcome_in_workspace(job: Job, state: State[Any] | None, started: float) -> StageOutcome:
    """Return the outcome that the job saved; if it died before that, what its state on the server says."""
    if signals.STOP.is_set():
        return StageOutcome.stopped(job.stage, started=started)
    pool = job.placement.pool
    if state is not None and state.is_cancelled():
        message = f"its job on {pool} was cancelled"
        return StageOutcome.failed(job.stage, message, EXIT_INTERRUPTED, started=started)
    saved = load_outcome(job.workspace, job.stage)
    completed = state is not None and state.is_completed()
    if saved is not None and saved.action != "stopped" and saved.ok == completed:
        return saved
    reason = f": {state.message.split('. ')[0]}" if state and state.message else ""
    message = f"its job on {pool} ended as {state.name if state else 'lost'}{reason}"
    ended = time.time()
    return StageOutcome.failed(job.stage, message, started=started, ended=ended, work_seconds=ended - started)
