"""The flow that runs one stage on a worker of a pool.

Where the workers share the workspace (one machine, or NFS), the stage runs in place and leaves its
outcome there. Where they do not, ``flows.jobs.remote`` rebuilds the workspace on the worker's host.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger, runtime
from prefect.client.orchestration import get_client
from prefect.exceptions import Abort, TerminationSignal
from prefect.states import Cancelled, Completed, Crashed, Failed, State

from flows.jobs.job import JOB_FLOW, Handoff
from flows.prefect_server.flow_runs import stopped_on_cancellation, told
from flows.stage import StageSpec, run_stage, shown_progress
from flows.supervision import signals
from flows.workspace import job_label

PREEMPTED = "Preempted"


def _run_name() -> str:
    return job_label(runtime.flow_run.parameters["workspace"], runtime.flow_run.parameters["stage"])


@flow(name=JOB_FLOW, flow_run_name=_run_name, persist_result=False, validate_parameters=True)
def stage_job(
    workspace: str,
    stage: str,
    outputs: list[str],
    environment: dict[str, str],
    grace: float = 5.0,
    handoff: dict[str, Any] | None = None,
) -> State[Any]:
    """Run one stage; the flow fails when the stage does. A job that is stopped stops its stage
    first.

    A preempted job (its worker, its machine or its stage alone was stopped) ends as Preempted. The
    pipeline submits it.

    Args:
        workspace: The workspace's folder, as the worker sees it.
        stage: Name of the stage in dvc.yaml.
        outputs: What it writes, relative to the workspace.
        environment: Variables that are set for it.
        grace: Seconds in which it may save its state when it is stopped.
        handoff: What a worker without the workspace's folder needs to make one; null for a shared
            folder.
    """
    # SIGTERM belongs to Prefect: its supervisor tells through the server whether it means a
    # cancellation.
    signals.install(signal.SIGINT, signal.SIGHUP)
    spec = StageSpec(Path(workspace), stage, tuple(outputs), environment, grace)
    try:
        with stopped_on_cancellation():
            if handoff is None:
                info = get_run_logger().info
                with shown_progress(spec.workspace, stage, lambda progress: info(progress.line)):
                    outcome = run_stage(spec)
            else:
                from flows.jobs.remote import run_remote_job

                outcome = run_remote_job(Handoff(**handoff), spec)
    except TerminationSignal:
        return _stopped_state(stage, "stopped by a signal")
    if outcome.ok:
        return Completed(message=f"{stage}: {outcome.action}")
    if outcome.action == "stopped":
        return _stopped_state(stage, "stopped by a signal")
    if outcome.preempted:
        return _stopped_state(stage, outcome.message)
    return told(Failed(message=f"{stage}: {outcome.message}"))


def _stopped_state(stage: str, reason: str) -> State[Any]:
    """Return Cancelled if a cancellation was requested on the server, else Preempted.

    Raises:
        Abort: the job is back in the queue, where Prefect's supervisor on a cluster puts it.
    """
    signal.signal(
        signal.SIGTERM, signal.SIG_IGN
    )  # a worker that shuts down signals its job a second time
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(runtime.flow_run.id).state
    if state is not None and state.is_scheduled():
        raise Abort(f"{stage} is in the queue again")
    if state is not None and (state.is_cancelling() or state.is_cancelled()):
        return Cancelled(message=f"{stage}: stopped on request")
    return preempted_state(f"{stage}: {reason}")


def preempted_state(message: str) -> State[Any]:
    """Return the final state of a preempted job.

    Its stage goes back to the queue as a new flow run: a process worker dies if the same flow run
    comes back before its process has ended.
    """
    return Crashed(name=PREEMPTED, message=message)
