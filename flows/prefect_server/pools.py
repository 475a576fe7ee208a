"""Work pools on the server: creating them, their limits and queues, and the resources they can
provide.
"""

from __future__ import annotations

import contextlib
import shlex

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.objects import WorkerStatus, WorkPool
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound

from rlhf_core.config.operations import WorkPoolConfig
from rlhf_core.config.params import Params
from rlhf_core.errors import ConfigError, RlhfError

PIPELINES_POOL = "pipelines"
GPU_POOL = "gpu-pool"
PROCESS = "process"
# The job variables of a process worker's own template; the server learns them only when the first
# such worker starts.
PROCESS_VARIABLES = frozenset({"name", "env", "labels", "command", "stream_output", "working_dir"})


def ensure_pool(client: SyncPrefectClient, pool: str, limit: int | None = None) -> WorkPool:
    """Return the pool named ``pool``; if there is none, create a process pool with the concurrency
    limit ``limit``.
    """
    try:
        return client.read_work_pool(pool)
    except ObjectNotFound:
        with contextlib.suppress(ObjectAlreadyExists):  # another run has just created it
            return client.create_work_pool(
                WorkPoolCreate(name=pool, type=PROCESS, concurrency_limit=limit)
            )
    return client.read_work_pool(pool)


def ensure_deployed_pools(params: Params) -> None:
    """Create the pools of prefect.yaml's deployments that do not exist yet, whether or not stages
    run on them.
    """
    with get_client(sync_client=True) as client:
        ensure_pool(client, PIPELINES_POOL)
        ensure_pool(client, GPU_POOL, limit=params.pool_limit(GPU_POOL))


def apply_pools(client: SyncPrefectClient, params: Params) -> None:
    """Create the pools that stages run on, and set limits and queues to those of ``work_pools`` in
    params.yaml.

    A pool that is created here takes one job at a time unless ``work_pools`` says otherwise.

    Raises:
        ConfigError: a stage requests something that its pool's base job template lacks and would
            silently ignore.
    """
    for name in params.pool_names():
        config = params.work_pools.get(name, WorkPoolConfig())
        pool = ensure_pool(client, name, limit=params.pool_limit(name))
        check_requests(pool, params)
        if config.limit is not None and config.limit != pool.concurrency_limit:
            client.update_work_pool(name, WorkPoolUpdate(concurrency_limit=config.limit))
        if config.queues:
            existing = {queue.name: queue for queue in client.read_work_queues(work_pool_name=name)}
            for queue, priority in config.queues.items():
                if queue not in existing:
                    with contextlib.suppress(ObjectAlreadyExists):
                        client.create_work_queue(queue, priority=priority, work_pool_name=name)
                elif existing[queue].priority != priority:
                    client.update_work_queue(existing[queue].id, priority=priority)


def check_requests(pool: WorkPool, params: Params) -> None:
    """Check that ``pool`` has every job variable that stages request from it.

    Raises:
        ConfigError: names the first stage that requests an unknown job variable.
    """
    # Empty as long as the server does not know the pool's template.
    variables = frozenset((pool.base_job_template.get("variables") or {}).get("properties") or {})
    variables = variables or (PROCESS_VARIABLES if pool.type == PROCESS else frozenset())
    for stage, placement in params.pools.items():
        if placement.pool != pool.name or not variables:
            continue
        unknown = sorted(set(placement.job_variables()) - variables)
        if unknown:
            raise ConfigError(
                f"pools.{stage} asks for {', '.join(unknown)}, which the work pool {pool.name} (type {pool.type}) does "
                "not know; remove that, or make the pool from a base job template that has it (docs/operations.md)"
            )


def online_workers(pool: str) -> int:
    """Count the workers of ``pool`` that have sent a heartbeat lately."""
    with get_client(sync_client=True) as client:
        return sum(
            worker.status == WorkerStatus.ONLINE
            for worker in client.read_workers_for_work_pool(pool)
        )


def pool_on_server(pool: str) -> WorkPool:
    """Read a work pool from the server of this process's settings."""
    with get_client(sync_client=True) as client:
        return client.read_work_pool(pool)


def idle_workers(params: Params) -> list[str]:
    """Say for which pools the limit on the server leaves some of their workers without a job."""
    lines = []
    for name in params.pool_names():
        limit, online = pool_on_server(name).concurrency_limit, online_workers(name)
        if limit is not None and online > limit:
            lines.append(
                f"the work pool {name} has {online} workers, but its limit lets {limit} job(s) run at a time; set "
                f"work_pools.{name}.limit in params.yaml to the number that may"
            )
    return lines


def needs_worker(pool: str) -> bool:
    """Whether a worker must be started here for ``pool``.

    Raises:
        RlhfError: the pool has no worker, and its type is not process, so that none can be started
            here.
    """
    if online_workers(pool):
        return False
    pool_type = pool_on_server(pool).type
    if pool_type != PROCESS:
        raise RlhfError(
            f"no worker serves the work pool {pool} (type {pool_type}); start one where its jobs can run"
        )
    return True


def missing_worker(pool: str) -> str | None:
    """Return the command that starts a worker of ``pool``; None where one is online."""
    if online_workers(pool):
        return None
    return f"prefect worker start --pool {shlex.quote(pool)} --type {pool_on_server(pool).type}"


def forgets_leases() -> bool:
    """Whether the server keeps in memory which runs hold the limits of their deployments.

    After a restart it knows none of them, and Prefect ends each such run when it renews its lease.
    """
    with get_client(sync_client=True) as client:
        settings = client.request("GET", "/admin/settings").json()
    storage = settings.get("server", {}).get("concurrency", {}).get("lease_storage", "")
    return str(storage).endswith(".memory")
