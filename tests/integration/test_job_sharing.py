"""Jobs on a real Prefect server: who gets which flow run, and what of a placement reaches the pool."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import FlowRun
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelled, Cancelling, Completed, Crashed, Failed, Running, State
from prefect_database import prefect_server

from flows.jobs.deployments import deploy_jobs
from flows.jobs.job import Job
from flows.jobs.run_on_pool import run_on_pool
from flows.jobs.submission import claim_flow_run, is_own_run
from flows.stage.outcome import StageOutcome
from flows.stage.run import StageSpec
from rlhf_core.config.loading.load import Params, check_params

pytestmark = pytest.mark.services
TEMPLATE = Path(__file__).resolve().parents[2] / "infra" / "untried" / "kubernetes" / "base-job-template.json"
ASKED = {"gpus": 8, "memory": "512Gi", "node_selector": {"gpu": "h100"}, "time_limit_seconds": 3600}
PARAMS = {
    "pools": {
        "ppo": {"pool": "cluster", "queue": "long", "image": "rlhf:1", "cpus": "32", "shared_memory": "64Gi", **ASKED},
        "sft": "gpu-pool",
    },
    "compute": {"launch": {"ppo": {"processes": 8}}},
    "work_pools": {"cluster": {"limit": 3, "queues": {"long": 2, "default": 5}}},
}


@pytest.fixture(scope="module")
def params() -> Params:
    return check_params(PARAMS)


@pytest.fixture(scope="module")
def client(
    params: Params, prefect_database: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SyncPrefectClient]:
    """A client of a fresh server with a Kubernetes pool, a process pool, and the deployments of both."""
    database = Path(shutil.copy(prefect_database, tmp_path_factory.mktemp("prefect")))
    with (
        prefect_server(database) as url,
        temporary_settings({PREFECT_API_URL: url}),
        get_client(sync_client=True) as client,
    ):
        template = json.loads(TEMPLATE.read_text())
        client.create_work_pool(WorkPoolCreate(name="cluster", type="kubernetes", base_job_template=template))
        deploy_jobs(tmp_path_factory.mktemp("w"), params)
        yield client


def job(params: Params, workspace: str, stage_hash: str | None, stage: str = "sft", attempt: str = "a:1") -> Job:
    return Job(StageSpec(Path(workspace), stage, grace=1.0), params.pools[stage], attempt, stage_hash)


def end(client: SyncPrefectClient, run: FlowRun, state: State[Any]) -> None:
    client.set_flow_run_state(run.id, state, force=True)


def test_a_run_under_way_is_shared_and_one_that_ended_is_never_given_again(
    client: SyncPrefectClient, params: Params
) -> None:
    mine, other = job(params, "/one", "c" * 64), job(params, "/two", "c" * 64)
    seen = set()
    for final in (Failed(), Crashed(), Cancelled(), Completed()):
        run = claim_flow_run(client, mine)
        assert run.id not in seen and is_own_run(run, mine)
        seen.add(run.id)
        for state in (None, Running()):
            if state is not None:
                end(client, run, state)
            assert claim_flow_run(client, mine).id == claim_flow_run(client, other).id == run.id
        assert not is_own_run(run, other)
        end(client, run, final)
    assert claim_flow_run(client, other).id not in seen


def test_a_run_that_is_being_cancelled_is_waited_for_but_not_taken_over(
    client: SyncPrefectClient, params: Params
) -> None:
    mine = job(params, "/one", "d" * 64)
    run = claim_flow_run(client, mine)
    end(client, run, Running())
    end(client, run, Cancelling())
    again = claim_flow_run(client, mine)
    assert again.id == run.id and not is_own_run(again, mine)


def test_submissions_at_the_same_moment_make_one_run(client: SyncPrefectClient, params: Params) -> None:
    ready = threading.Barrier(4)

    def submit(number: int) -> FlowRun:
        ready.wait()
        # A thread does not inherit the settings.
        with temporary_settings({PREFECT_API_URL: str(client.api_url)}), get_client(sync_client=True) as own:
            return claim_flow_run(own, job(params, f"/workspace-{number}", "e" * 64))

    with ThreadPoolExecutor(4) as threads:
        runs = list(threads.map(submit, range(4)))
    assert len({run.id for run in runs}) == 1


def test_what_cannot_be_shared_has_one_run_for_each_attempt(client: SyncPrefectClient, params: Params) -> None:
    first = claim_flow_run(client, job(params, "/one", None, attempt="x:1"))
    assert claim_flow_run(client, job(params, "/one", None, attempt="x:1")).id == first.id
    assert claim_flow_run(client, job(params, "/one", None, attempt="x:2")).id != first.id


def test_requests_queue_and_limits_reach_the_server(client: SyncPrefectClient, params: Params) -> None:
    run = claim_flow_run(client, job(params, "/one", None, stage="ppo", attempt="y:1"))
    assert run.job_variables == {**ASKED, "image": "rlhf:1", "cpus": "32", "shared_memory": "64Gi"}
    assert run.work_queue_name == "long"
    assert client.read_work_pool("cluster").concurrency_limit == 3
    assert client.read_work_pool("gpu-pool").concurrency_limit == 1
    queues = {queue.name: queue.priority for queue in client.read_work_queues(work_pool_name="cluster")}
    assert queues == {"long": 2, "default": 5}


def test_who_waited_for_another_workspace_then_finds_the_result_with_a_job_of_its_own(
    client: SyncPrefectClient, params: Params, tmp_path: Path
) -> None:
    theirs = claim_flow_run(client, job(params, "/elsewhere", "f" * 64))
    end(client, theirs, Running())
    mine = job(params, str(tmp_path), "f" * 64)
    steps: list[FlowRun] = []

    def drive() -> None:
        """The worker's part: end the other's run, then answer for our own, as its job would."""
        run = claim_flow_run(client, mine)
        if run.id == theirs.id:
            end(client, run, Completed())
        elif not steps:
            steps.append(run)
            StageOutcome.cached("sft", 0.0, 0.0).save(tmp_path)
            end(client, run, Completed())

    @flow
    def pipeline() -> StageOutcome:
        return run_on_pool(mine, drive)

    outcome = pipeline()
    assert outcome.ok and outcome.action == "cached"
    assert len(steps) == 1 and steps[0].id != theirs.id
