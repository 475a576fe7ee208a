"""Submission of jobs: one flow run per attempt; identical computations from several pipelines share one flow run.

Prefect answers a known idempotency key with the old flow run, whatever became of it. The key of a shared computation
therefore hashes the runs of it that have ended: while one is under way every submission returns that one, and once it
has ended, successfully or not, the next submission creates a new one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterTags
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.sorting import FlowRunSort
from prefect.deployments import run_deployment

from flows.jobs.job import Job, job_deployment
from flows.workspace.run_label import job_label

RECENT = 200
ATTEMPTS = 3


def claim_flow_run(client: SyncPrefectClient, job: Job) -> FlowRun:
    """Return the flow run to wait for: the one under way for this computation, else a new one for this job.

    Between query and submission another pipeline's run may begin, which the shared key then returns, or end, upon which
    the query is repeated. If that does not settle, the job gets a run of its own.
    """
    if job.stage_hash is None:
        return _submit(job, job.attempt, [])
    of_computation = FlowRunFilter(tags=FlowRunFilterTags(all_=[job.tag]))
    for _ in range(ATTEMPTS):
        runs = client.read_flow_runs(flow_run_filter=of_computation, sort=FlowRunSort.START_TIME_DESC, limit=RECENT)
        active = next((run for run in runs if not _has_ended(run)), None)
        run = active or _submit(job, _shared_key(job.tag, runs), [job.tag])
        if not _has_ended(run):
            return run
    return _submit(job, job.attempt, [job.tag])


def is_own_run(run: FlowRun, job: Job) -> bool:
    """Whether ``run`` can serve as the run of ``job``: it has the same workspace and is not being cancelled."""
    cancelling = run.state is not None and run.state.is_cancelling()
    return run.parameters.get("workspace") == str(job.workspace) and not cancelling


def _shared_key(tag: str, ended_runs: Sequence[FlowRun]) -> str:
    """Return an idempotency key that is the same for all pipelines that have seen the same runs end."""
    ended_ids = "".join(sorted(str(run.id) for run in ended_runs))
    return f"{tag}:{hashlib.sha256(ended_ids.encode()).hexdigest()[:32]}"


def _has_ended(run: FlowRun) -> bool:
    return run.state is not None and run.state.is_final()


def _submit(job: Job, idempotency_key: str, tags: Sequence[str]) -> FlowRun:
    parameters: dict[str, Any] = {
        "workspace": str(job.workspace),
        "stage": job.stage,
        "outputs": list(job.spec.outputs),
        "environment": dict(job.spec.environment),
        "grace": job.spec.grace,
    }
    if job.handoff is not None:
        parameters["handoff"] = job.handoff.parameters()
    run = run_deployment(
        job_deployment(job.placement.pool, job.placement.shared),
        parameters=parameters,
        timeout=0,
        as_subflow=True,
        idempotency_key=idempotency_key,
        flow_run_name=job_label(str(job.workspace), job.stage),
        tags=[job.workspace.name, job.stage, *tags],
        work_queue_name=job.placement.queue,
        job_variables=job.placement.job_variables(),
    )
    assert isinstance(run, FlowRun)
    return run
