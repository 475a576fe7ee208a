"""Handing a stage to a work pool: one flow run per attempt, and one at a time for what several pipelines compute alike.

Prefect answers an idempotency key that it has seen with the old flow run, whatever became of it. So the key of a shared
computation holds the runs of it that have ended: while one is under way everybody gets that one, and once it has ended,
well or badly, the next submission makes a new one.
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

RECENT = 200


def claim(client: SyncPrefectClient, job: Job) -> FlowRun:
    """The flow run to wait for: the one under way for this computation, else a new one of this job's own.

    Between the look and the submission somebody else's run may begin (then that one is the answer, by its key) or end
    (then the look is repeated). Should that not settle, the job runs by itself.
    """
    if job.stage_hash is None:
        return _create(job, job.attempt, [])
    for _ in range(3):
        known = _tagged(client, job.tag)
        active = next((run for run in known if not _ended(run)), None)
        run = active or _create(job, _key_after(job.tag, known), [job.tag])
        if not _ended(run):
            return run
    return _create(job, job.attempt, [job.tag])


def is_own_run(run: FlowRun, job: Job) -> bool:
    """Whether ``run`` may stand for ``job``: it works in the same workspace, and nobody has asked for its end."""
    ending = run.state is not None and run.state.is_cancelling()
    return run.parameters.get("workspace") == str(job.workspace) and not ending


def _tagged(client: SyncPrefectClient, tag: str) -> list[FlowRun]:
    """The latest flow runs with ``tag``."""
    with_tag = FlowRunFilter(tags=FlowRunFilterTags(all_=[tag]))
    return client.read_flow_runs(flow_run_filter=with_tag, sort=FlowRunSort.START_TIME_DESC, limit=RECENT)


def _key_after(tag: str, ended: Sequence[FlowRun]) -> str:
    """An idempotency key that everybody who has seen the same runs end comes to, and nobody before."""
    past = hashlib.sha256("".join(sorted(str(run.id) for run in ended)).encode()).hexdigest()
    return f"{tag}:{past[:32]}"


def _ended(run: FlowRun) -> bool:
    return run.state is not None and run.state.is_final()


def _create(job: Job, key: str, tags: Sequence[str]) -> FlowRun:
    parameters: dict[str, Any] = {
        "workspace": str(job.workspace),
        "stage": job.stage,
        "outputs": list(job.outputs),
        "environment": dict(job.environment),
        "grace": job.grace,
    }
    if job.handoff is not None:
        parameters["handoff"] = job.handoff.parameters()
    run = run_deployment(
        job_deployment(job.placement.pool, job.placement.shared),
        parameters=parameters,
        timeout=0,
        as_subflow=True,
        idempotency_key=key,
        flow_run_name=job.stage,
        tags=tags,
        work_queue_name=job.placement.queue,
        job_variables=job.placement.job_variables(),
    )
    assert isinstance(run, FlowRun)
    return run
