"""A stage on a work pool: the job that runs there, and submitting and awaiting it.

Where the pool's workers share the workspace (one machine, or NFS) the job runs in place, and its outcome is read from
there. Where they do not, ``flows.jobs.remote_client`` says what goes to the job's host and what comes back.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from prefect import flow, runtime
from prefect.client.orchestration import get_client
from prefect.exceptions import Abort, TerminationSignal
from prefect.states import Cancelled, Completed, Crashed, Failed, State

from flows.jobs.job import JOB_FLOW, Handoff
from flows.stage.run import run_stage
from flows.supervision import signals

PREEMPTED = "Preempted"


@flow(name=JOB_FLOW, flow_run_name="{stage}", persist_result=False, validate_parameters=True)
def stage_job(
    workspace: str,
    stage: str,
    outputs: list[str],
    environment: dict[str, str],
    grace: float = 5.0,
    handoff: dict[str, Any] | None = None,
) -> State[Any]:
    """One stage on a pool's worker. Fails when the stage does; a job that is stopped stops its stage first.

    A job that loses its place (its worker or machine is told to stop, or its stage alone is) ends as Preempted.
    """
    # SIGTERM is Prefect's: whoever supervises this process says by a channel of its own what is meant by it.
    signals.install(signal.SIGINT, signal.SIGHUP)
    try:
        if handoff is None:
            outcome = run_stage(Path(workspace), stage, tuple(outputs), environment, grace)
        else:
            from flows.jobs.remote_host import run_remote_job

            outcome = run_remote_job(Handoff(**handoff), stage, tuple(outputs), environment, grace)
    except TerminationSignal:
        return _stopped(stage, "stopped by a signal from outside")
    if outcome.ok:
        return Completed(message=f"{stage}: {outcome.action}")
    if outcome.action == "stopped":
        return _stopped(stage, "stopped by a signal from outside")
    if outcome.preempted:
        return _stopped(stage, outcome.message)
    return Failed(message=f"{stage}: {outcome.message}")


def _stopped(stage: str, why: str) -> State[Any]:
    """Cancelled if the server was asked for that, else Preempted. ``Abort`` when the job is in the queue again already,
    as Prefect's supervisor on a cluster puts it there."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a worker that shuts down tells its job once more
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(runtime.flow_run.id).state
    if state is not None and state.is_scheduled():
        raise Abort(f"{stage} is in the queue again")
    if state is not None and (state.is_cancelling() or state.is_cancelled()):
        return Cancelled(message=f"{stage}: stopped on request")
    return preempted(f"{stage}: {why}")


def preempted(message: str) -> State[Any]:
    """The end of a job that lost its place. Its stage goes back to the queue as a new flow run, since a process worker
    dies of an old one that comes back before its process has ended."""
    return Crashed(name=PREEMPTED, message=message)
