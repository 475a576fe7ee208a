"""Submit a stage to a work pool and wait for its job; one that was preempted or never began is
submitted again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import run_deployment
from prefect.states import Cancelled, Cancelling, State

from flows.dvc_repo.graph import StageNode
from flows.jobs.job import JOB_FLOW, Job, job_name
from flows.jobs.remote import prepare_remote_job, receive_result
from flows.jobs.stage_job import PREEMPTED, preempted_state
from flows.jobs.transfer import LogFollower, restore_result
from flows.prefect_server.pools import missing_worker
from flows.stage import StageOutcome, clear_outcome, load_outcome, load_report, stage_log
from flows.supervision import signals
from flows.workspace import job_label
from rlhf_core.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, RlhfError

POLL_SECONDS = 0.5
CANCEL_SECONDS = 6.0
REPORT_POLLS = 10
QUEUE_POLLS = 40  # a free worker asks every 10 s, give or take 3
REMINDER_POLLS = 1200  # that many later, and again, a wait is told again: every ten minutes
FALSE_STARTS = 2


def run_on_remote_pool(job: Job, node: StageNode, on_wait: Callable[[str], None]) -> StageOutcome:
    """Run :func:`run_on_pool` for a pool whose workers do not see the workspace."""
    started = time.time()
    try:
        if node.shareable and (restored := restore_result(job.spec)) is not None:
            return restored
        remote_job = prepare_remote_job(job, node)
    except KeyboardInterrupt:
        return StageOutcome.stopped(job.spec.name, started=started)
    except RlhfError as error:
        message = f"the stage cannot be submitted to the work pool {job.placement.pool}: {error}"
        return StageOutcome.failed(job.spec.name, message, error.exit_code, started=started)
    return run_on_pool(remote_job, on_wait)


def run_on_pool(job: Job, on_wait: Callable[[str], None]) -> StageOutcome:
    """Submit ``job`` to its pool and return its outcome; a failing stage does not raise.

    A job whose process ended before it began is submitted again, ``FALSE_STARTS`` times at most: a
    new process gives up at once where the server does not answer its first request.

    Args:
        on_wait: given a message each time the job is to be submitted again, when no worker takes
            it, every ten minutes that none does, and when one does.
    """
    started = time.time()
    preemptions = false_starts = 0
    follower = (
        LogFollower(stage_log(job.spec.workspace, job.spec.name))
        if job.handoff is not None
        else None
    )
    with get_client(sync_client=True) as client:
        while True:
            clear_outcome(job.spec.workspace, job.spec.name)
            repeats = preemptions + false_starts
            attempt = f"{job.attempt}:{repeats}" if repeats else job.attempt
            run = submit(replace(job, attempt=attempt))
            state = _await_end(client, run.id, job, follower, on_wait)
            if state is None:
                return StageOutcome.stopped(job.spec.name, started=started)
            if _was_preempted(job, state):
                preemptions += 1
                if preemptions > job.max_preemptions:
                    message = f"preempted more than {job.max_preemptions} times (flow.max_preemptions); run it again"
                    return StageOutcome.failed(
                        job.spec.name, f"{message} to resume", EXIT_PREEMPTED, started=started
                    )
                on_wait(f"preempted, waiting for a worker of {job.placement.pool}")
                continue
            never_began = (state.is_crashed() or state.is_failed()) and client.read_flow_run(
                run.id
            ).run_count == 0
            if false_starts < FALSE_STARTS and never_began:
                false_starts += 1
                ended = "its process ended before the job began"
                on_wait(f"{ended}, waiting for a worker of {job.placement.pool}")
                continue
            if follower is not None:
                follower.fetch(client, run.id, now=True)
                if (reported := receive_result(job, client, run.id)) is not None:
                    return reported
            return _outcome_in_workspace(job, state, started)


def submit(job: Job) -> FlowRun:
    """Create the flow run of this attempt at a job; the run that exists if the attempt was
    submitted before.
    """
    parameters: dict[str, Any] = {
        "workspace": str(job.spec.workspace),
        "stage": job.spec.name,
        "outputs": list(job.spec.outputs),
        "environment": dict(job.spec.environment),
        "grace": job.spec.grace,
    }
    if job.handoff is not None:
        parameters["handoff"] = asdict(job.handoff)
    run = run_deployment(
        f"{JOB_FLOW}/{job_name(job.spec.workspace, job.placement.pool, job.placement.shared)}",
        parameters=parameters,
        timeout=0,
        as_subflow=True,
        idempotency_key=job.attempt,
        flow_run_name=job_label(str(job.spec.workspace), job.spec.name),
        tags=[job.spec.workspace.name, job.spec.name],
        work_queue_name=job.placement.queue,
        job_variables=job.placement.job_variables(),
    )
    assert isinstance(run, FlowRun)
    return run


def _await_end(
    client: SyncPrefectClient,
    run: UUID,
    job: Job,
    follower: LogFollower | None,
    on_wait: Callable[[str], None],
) -> State[Any] | None:
    """Wait for the run's final state; None after a stop signal, when the job is cancelled and
    waited for briefly.

    If the stage of the job has reported its preemption, the job has a while to end by itself. Its
    process may have died with its worker, which the server would notice much later.
    """
    polls_left, polls_queued = REPORT_POLLS, 0
    while not signals.STOP.is_set():
        state = client.read_flow_run(run).state
        if state is not None and state.is_final():
            return state
        if state is not None and state.is_scheduled():
            polls_queued += 1
            if polls_queued >= QUEUE_POLLS and (polls_queued - QUEUE_POLLS) % REMINDER_POLLS == 0:
                on_wait(_describe_wait(job.placement.pool))
        elif polls_queued >= QUEUE_POLLS:
            polls_queued = 0
            on_wait(f"taken by a worker of {job.placement.pool}")
        if _stage_reported_preemption(job, state):
            polls_left -= 1
            if polls_left <= 0:
                client.set_flow_run_state(
                    run, preempted_state(f"{job.spec.name}: its worker is gone"), force=True
                )
        if not signals.STOP.wait(POLL_SECONDS) and follower is not None:
            follower.fetch(client, run)
    cancel_and_wait(client, run)
    return None


def _describe_wait(pool: str) -> str:
    """Say what a job waits for, and how to start a worker where the pool has none."""
    command = missing_worker(pool)
    remedy = f"; none is online, and `{command}` starts one" if command else ""
    return f"no worker is free, waiting for one of {pool}{remedy}"


def _stage_reported_preemption(job: Job, state: State[Any] | None) -> bool:
    """Whether the stage has reported its preemption since its job began to run."""
    report = load_report(job.spec.workspace, job.spec.name)
    if report is None or state is None or not state.is_running():
        return False
    return report.exit_code == EXIT_PREEMPTED and report.ended >= state.timestamp.timestamp()


def _was_preempted(job: Job, state: State[Any]) -> bool:
    """Whether a job ended because of a preemption, by its own state or, if it died before that, its
    stage's report.
    """
    if state.is_completed() or state.is_cancelled():
        return False
    report = load_report(job.spec.workspace, job.spec.name)
    return state.name == PREEMPTED or (report is not None and report.exit_code == EXIT_PREEMPTED)


def cancel_and_wait(client: SyncPrefectClient, run: UUID) -> None:
    """Cancel a job, at once or through its worker if one has it, and wait a few seconds for its
    end.
    """
    deadline = time.monotonic() + CANCEL_SECONDS
    state = client.read_flow_run(run).state
    if state is not None and not state.is_final():
        cancelled = Cancelled if state.is_scheduled() else Cancelling
        client.set_flow_run_state(run, cancelled(message="the pipeline run was stopped"))
    while time.monotonic() < deadline and not (
        (state := client.read_flow_run(run).state) and state.is_final()
    ):
        time.sleep(0.2)


def _outcome_in_workspace(job: Job, state: State[Any], started: float) -> StageOutcome:
    """Return the outcome that the job saved; if it died before that, what its state on the server
    says.
    """
    pool = job.placement.pool
    if state.is_cancelled():
        message = f"its job on {pool} was cancelled"
        return StageOutcome.failed(job.spec.name, message, EXIT_INTERRUPTED, started=started)
    saved = load_outcome(job.spec.workspace, job.spec.name)
    if saved is not None and saved.action != "stopped" and saved.ok == state.is_completed():
        return saved
    reason = f": {state.message.split('. ')[0]}" if state.message else ""
    message, ended = f"its job on {pool} ended as {state.name}{reason}", time.time()
    return StageOutcome.failed(
        job.spec.name, message, started=started, ended=ended, work_seconds=ended - started
    )
