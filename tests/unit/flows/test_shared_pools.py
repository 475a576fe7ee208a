"""A work pool of a lasting server, which several workspaces and workers use."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import FlowRun, WorkerStatus

from flows.prefect_server import flow_runs, pools
from flows.prefect_server.services import Services
from rlhf_core.config.loading import check_params

ENDED_PROCESS = str(2**22 + 1)  # above the kernel's highest


def job(workspace: str, process: str | None) -> FlowRun:
    return FlowRun(flow_id=uuid4(), parameters={"workspace": workspace}, infrastructure_pid=process)


def test_a_dead_worker_takes_no_job_of_another_workspace_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    own, unstarted = job("/mine", ENDED_PROCESS), job("/mine", None)
    elsewhere, alive = job("/theirs", ENDED_PROCESS), job("/mine", str(os.getpid()))
    ended = []
    server = SimpleNamespace(
        read_flow_runs=lambda **_: [own, elsewhere, unstarted, alive],
        set_flow_run_state=lambda run, state, force: ended.append(run),
    )
    monkeypatch.setattr(flow_runs, "get_client", lambda sync_client: nullcontext(server))
    assert flow_runs.crash_pool_runs("gpu-pool", "killed", Path("/mine")) == 2
    assert ended == [own.id, unstarted.id]
    assert flow_runs.crash_pool_runs("gpu-pool", "killed") == 4, "the embedded server has no other pipelines"


@pytest.mark.parametrize(("limit", "said"), [(None, False), (3, False), (1, True)])
def test_a_limit_that_leaves_workers_idle_is_said(
    monkeypatch: pytest.MonkeyPatch, limit: int | None, said: bool
) -> None:
    workers = [SimpleNamespace(status=status) for status in (*[WorkerStatus.ONLINE] * 3, WorkerStatus.OFFLINE)]
    server = SimpleNamespace(
        read_work_pool=lambda name: SimpleNamespace(concurrency_limit=limit),
        read_workers_for_work_pool=lambda name: workers,
    )
    monkeypatch.setattr(pools, "get_client", lambda sync_client: nullcontext(server))
    lines = pools.idle_workers(check_params({"pools": {"ppo": "gpu-pool"}}))
    assert [line.partition(";")[0] for line in lines] == (
        ["the work pool gpu-pool has 3 workers, but its limit lets 1 job(s) run at a time"] if said else []
    )


def test_only_a_server_of_somebody_else_is_waited_for_longer(tmp_path: Path) -> None:
    assert Services(tmp_path, "http://127.0.0.1:1/api", embedded=True).client_settings == {}
    lasting = Services(tmp_path, "http://127.0.0.1:1/api", embedded=False)
    assert lasting.client_settings == {"PREFECT_CLIENT_MAX_RETRIES": "8"}
