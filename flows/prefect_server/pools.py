"""Work pools on the server: their existence, limits and queues, and whether they can give what jobs ask for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.objects import WorkerStatus, WorkPool
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound

from rlhf_core.config.loading.load import Params
from rlhf_core.config.placement import WorkPoolConfig
from rlhf_core.errors import ConfigError, RlhfError

PIPELINES_POOL = "pipelines"
GPU_POOL = "gpu-pool"
PROCESS = "process"
# What a process worker's own template knows; the server learns it only when the first such worker starts.
PROCESS_VARIABLES = frozenset({"name", "env", "labels", "command", "stream_output", "working_dir"})


def ensure_pool(client: SyncPrefectClient, pool: str, limit: int | None = None) -> WorkPool:
    """The pool of that name; a process pool with ``limit`` is made when there is none."""
    try:
        return client.read_work_pool(pool)
    except ObjectNotFound:
        with contextlib.suppress(ObjectAlreadyExists):  # by another run, just now
            return client.create_work_pool(WorkPoolCreate(name=pool, type=PROCESS, concurrency_limit=limit))
    return client.read_work_pool(pool)


def ensure_pools(pools: Iterable[str]) -> None:
    """Create the process pools that do not exist yet."""
    with get_client(sync_client=True) as client:
        for pool in pools:
            ensure_pool(client, pool)


def apply_pools(client: SyncPrefectClient, params: Params) -> None:
    """Make the pools that stages run on, and bring limits and queues to what ``work_pools`` says of them.

    A pool that is made here takes one job at a time unless told otherwise. ``ConfigError`` when a stage asks a pool for
    something that its base job template does not have: it would be ignored without a word.
    """
    for name in params.pool_names():
        wanted = params.work_pools.get(name, WorkPoolConfig())
        pool = ensure_pool(client, name, limit=params.pool_limit(name))
        check_requests(pool, params)
        if wanted.limit is not None and wanted.limit != pool.concurrency_limit:
            client.update_work_pool(name, WorkPoolUpdate(concurrency_limit=wanted.limit))
        if wanted.queues:
            _apply_queues(client, name, wanted.queues)


def _apply_queues(client: SyncPrefectClient, pool: str, priorities: dict[str, int]) -> None:
    known = {queue.name: queue for queue in client.read_work_queues(work_pool_name=pool)}
    for name, priority in priorities.items():
        if name not in known:
            with contextlib.suppress(ObjectAlreadyExists):
                client.create_work_queue(name, priority=priority, work_pool_name=pool)
        elif known[name].priority != priority:
            client.update_work_queue(known[name].id, priority=priority)


def check_requests(pool: WorkPool, params: Params) -> None:
    """``ConfigError`` for the first stage that asks ``pool`` for a job variable which the pool does not know."""
    known = _variables(pool)
    for stage, place in params.pools.items():
        unknown = sorted(set(place.job_variables()) - known) if place.pool == pool.name and known else []
        if unknown:
            raise ConfigError(
                f"pools.{stage} asks for {', '.join(unknown)}, which the work pool {pool.name} (type {pool.type}) does "
                "not know; remove that, or make the pool from a base job template that has it (docs/operations.md)"
            )


def _variables(pool: WorkPool) -> frozenset[str]:
    """The job variables of a pool; empty when its template is not known yet."""
    declared = frozenset((pool.base_job_template.get("variables") or {}).get("properties") or {})
    return declared or (PROCESS_VARIABLES if pool.type == PROCESS else frozenset())


def has_worker(client: SyncPrefectClient, pool: str) -> bool:
    """Whether a worker of ``pool`` has been heard of lately."""
    return any(worker.status == WorkerStatus.ONLINE for worker in client.read_workers_for_work_pool(pool))


def is_served(pool: str) -> bool:
    """:func:`has_worker` on the server of this process's settings."""
    with get_client(sync_client=True) as client:
        return has_worker(client, pool)


def needs_worker(pool: str) -> bool:
    """Whether a worker must be started here for ``pool``; ``RlhfError`` if it has none and is not of process type."""
    with get_client(sync_client=True) as client:
        if has_worker(client, pool):
            return False
        kind = client.read_work_pool(pool).type
    if kind != PROCESS:
        raise RlhfError(f"no worker serves the work pool {pool} (type {kind}); start one where its jobs can run")
    return True
