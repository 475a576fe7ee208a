"""Work pools: what may be asked of them, several workspaces on one, and a worker where there is
none.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

import httpx
import pytest
from prefect.client.schemas.objects import FlowRun, WorkerStatus, WorkPool
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound

from flows.commands.run import _check_remote_pools
from flows.prefect_server import flow_runs, pools
from flows.prefect_server import monitor as workers
from flows.prefect_server.monitor import ServiceMonitor
from flows.prefect_server.pools import PROCESS_VARIABLES, check_requests, ensure_pool
from flows.prefect_server.services import Services
from flows.workspace import record_services
from rlhf_core.config.loading import check_params
from rlhf_core.config.params import Params
from rlhf_core.errors import ConfigError, RlhfError


def pool(kind: str, *variables: str) -> WorkPool:
    template: dict[str, Any] = {
        "job_configuration": {},
        "variables": {"properties": {name: {} for name in variables}},
    }
    return WorkPool(name="gpu-pool", type=kind, base_job_template=template if variables else {})


def params(**asked: object) -> Params:
    placed = {"ppo": {"pool": "gpu-pool", **asked}, "sft": "other"}
    return check_params({"pools": placed, "compute": {"launch": {"ppo": {"processes": 8}}}})


def test_a_request_that_would_be_ignored_is_refused_with_stage_and_pool() -> None:
    with pytest.raises(
        ConfigError, match=r"pools\.ppo asks for gpus, memory, which the work pool gpu-pool \("
    ):
        check_requests(pool("process"), params(gpus=8, memory="64Gi"))
    with pytest.raises(ConfigError, match=r"asks for gpus,"):
        check_requests(pool("kubernetes", "image", "memory"), params(gpus=8, memory="64Gi"))


def test_what_the_template_knows_may_be_asked_for() -> None:
    check_requests(pool("kubernetes", "gpus", "memory"), params(gpus=8, memory="64Gi"))
    check_requests(pool("process"), params(queue="long", variables={"working_dir": "/scratch"}))


def test_a_template_that_is_not_known_yet_is_trusted() -> None:
    check_requests(pool("kubernetes"), params(gpus=8))


def test_a_pool_that_another_run_makes_at_the_same_moment_is_taken_as_it_is() -> None:
    class Server:
        """A server on which the pool appears between the query and the attempt to create it."""

        asked = 0

        def read_work_pool(self, name: str) -> WorkPool:
            self.asked += 1
            if self.asked == 1:
                raise ObjectNotFound(refusal(404))
            return pool("process")

        def create_work_pool(self, _: object) -> WorkPool:
            raise ObjectAlreadyExists(refusal(409))

    assert ensure_pool(Server(), "gpu-pool", limit=1).name == "gpu-pool"  # type: ignore[arg-type]


def refusal(status: int) -> httpx.HTTPStatusError:
    request = httpx.Request("GET", "http://127.0.0.1")
    return httpx.HTTPStatusError(
        "", request=request, response=httpx.Response(status, request=request)
    )


def test_the_variables_of_process_pools_are_prefects_own() -> None:
    from prefect.workers.process import ProcessWorker

    assert (
        set(ProcessWorker.get_default_base_job_template()["variables"]["properties"])
        == PROCESS_VARIABLES
    )


ENDED_PROCESS = str(2**22 + 1)  # above the kernel's highest


def job(workspace: str, process: str | None) -> FlowRun:
    return FlowRun(flow_id=uuid4(), parameters={"workspace": workspace}, infrastructure_pid=process)


def test_a_dead_worker_takes_no_job_of_another_workspace_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
    assert flow_runs.crash_pool_runs("gpu-pool", "killed") == 4, (
        "the embedded server has no other pipelines"
    )


@pytest.mark.parametrize(("limit", "said"), [(None, False), (3, False), (1, True)])
def test_a_limit_that_idles_workers_is_said(
    monkeypatch: pytest.MonkeyPatch, limit: int | None, said: bool
) -> None:
    workers = [
        SimpleNamespace(status=status)
        for status in (*[WorkerStatus.ONLINE] * 3, WorkerStatus.OFFLINE)
    ]
    server = SimpleNamespace(
        read_work_pool=lambda name: SimpleNamespace(concurrency_limit=limit),
        read_workers_for_work_pool=lambda name: workers,
    )
    monkeypatch.setattr(pools, "get_client", lambda sync_client: nullcontext(server))
    lines = pools.idle_workers(check_params({"pools": {"ppo": "gpu-pool"}}))
    assert [line.partition(";")[0] for line in lines] == (
        ["the work pool gpu-pool has 3 workers, but its limit lets 1 job(s) run at a time"]
        if said
        else []
    )


@pytest.mark.parametrize(
    ("name", "kind", "status", "command"),
    [
        ("gpu-pool", "process", WorkerStatus.ONLINE, None),
        ("gpu-pool", "process", WorkerStatus.OFFLINE, "--pool gpu-pool --type process"),
        ("the cluster", "kubernetes", None, "--pool 'the cluster' --type kubernetes"),
    ],
)
def test_the_command_that_starts_a_missing_worker(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    kind: str,
    status: WorkerStatus | None,
    command: str | None,
) -> None:
    workers = [SimpleNamespace(status=status)] if status else []
    server = SimpleNamespace(
        read_work_pool=lambda name: SimpleNamespace(type=kind),
        read_workers_for_work_pool=lambda name: workers,
    )
    monkeypatch.setattr(pools, "get_client", lambda sync_client: nullcontext(server))
    expected = command and f"prefect worker start {command}"
    assert pools.missing_worker(name) == expected


def test_only_a_server_of_somebody_else_is_waited_for_longer(tmp_path: Path) -> None:
    assert Services(tmp_path, "http://127.0.0.1:1/api", embedded=True).client_settings == {}
    lasting = Services(tmp_path, "http://127.0.0.1:1/api", embedded=False)
    assert lasting.client_settings == {"PREFECT_CLIENT_MAX_RETRIES": "8"}


PARAMS = check_params(
    {"pools": {"ppo": "cluster", "sft": "gpu-pool"}, "work_pools": {"gpu-pool": {"limit": 3}}}
)


@dataclass
class Started:
    """Stands in for the services and records which workers are started."""

    embedded: bool = False
    running: dict[str, int] = field(default_factory=dict)
    ended: list[Any] = field(default_factory=list)
    workspace: Path = Path("workspace")

    def dead(self) -> list[Any]:
        return self.ended

    def start_worker(self, pool: str, limit: int) -> None:
        self.running[f"worker-{pool}"] = limit


class Server:
    """The server's view: which pools have a worker, and which errors it answers with."""

    def __init__(self, *served: str) -> None:
        self.served, self.error = set(served), cast("Exception | None", None)

    def needs_worker(self, pool: str) -> bool:
        if self.error is not None:
            raise self.error
        return pool not in self.served


def make(
    monkeypatch: pytest.MonkeyPatch, server: Server, clock: list[float], **services: Any
) -> tuple[ServiceMonitor, Started]:
    monkeypatch.setattr(workers, "needs_worker", server.needs_worker)
    monkeypatch.setattr(workers.time, "monotonic", lambda: clock[0])
    started = Started(**services)
    return ServiceMonitor(cast(Services, started), PARAMS, PARAMS.pool_names(), print, 0), started


def test_only_pools_without_a_worker_get_one_and_with_their_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served, started = make(monkeypatch, Server("cluster"), [0.0])
    served.start_missing()
    assert started.running == {"worker-gpu-pool": 3}


def test_a_worker_that_ends_later_is_replaced_at_the_next_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, clock = Server("cluster", "gpu-pool"), [0.0]
    served, started = make(monkeypatch, server, clock)
    served.start_missing()
    server.served.clear()
    served.check()
    assert started.running == {}  # not checked every time
    clock[0] = workers.CHECK_SECONDS
    served.check()
    assert set(started.running) == {"worker-cluster", "worker-gpu-pool"}


@pytest.mark.parametrize(
    "error", [httpx.ConnectError("down"), RlhfError("no worker serves the pool")]
)
def test_errors_at_a_later_check_end_nothing(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    server, clock = Server(), [0.0]
    served, started = make(monkeypatch, server, clock)
    server.error, clock[0] = error, 100.0
    served.check()
    assert started.running == {}
    with pytest.raises(type(error)):
        served.start_missing()


def test_a_worker_that_dies_while_the_server_is_away_is_replaced_when_it_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served, started = make(monkeypatch, Server("cluster", "gpu-pool"), [0.0])
    served.start_missing()
    served.worker_restarts = 1
    started.ended = [SimpleNamespace(name="worker-gpu-pool", poll=lambda: 1)]
    answers: list[Exception | None] = [httpx.ConnectError("down"), httpx.ReadTimeout("slow"), None]

    def crash_pool_runs(*_: object) -> None:
        if (error := answers.pop(0)) is not None:
            raise error

    monkeypatch.setattr(workers.flow_runs, "crash_pool_runs", crash_pool_runs)
    monkeypatch.setattr(workers, "RESTART_PAUSE_SECONDS", 0.0)
    assert served.check() is None and served.check() is None
    assert started.running == {} and served.worker_restarts == 1
    assert served.check() is None
    assert started.running == {"worker-gpu-pool": 3} and served.worker_restarts == 0
    waits, replaced = capsys.readouterr().out.splitlines()
    assert "when the Prefect server answers" in waits and "starting another" in replaced


def test_the_embedded_server_has_no_other_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    server.error = AssertionError("not asked")
    served, started = make(monkeypatch, server, [0.0], embedded=True)
    served.start_missing()
    assert set(started.running) == {"worker-cluster", "worker-gpu-pool"}


def test_jobs_on_other_hosts_go_to_the_server_of_rlhf_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefect reads its address when it is loaded, which the check of the remotes does."""
    monkeypatch.setattr("flows.jobs.remote.check_remote_stages", lambda *_: None)
    monkeypatch.setenv("PREFECT_API_URL", "")
    away = check_params({"pools": {"ppo": {"pool": "cluster", "shared": False}}})
    with pytest.raises(RlhfError, match="need a lasting server"):
        _check_remote_pools(tmp_path, away)
    record_services(tmp_path, "http://127.0.0.1:4200/api", "http://127.0.0.1:5000")
    _check_remote_pools(tmp_path, away)
    assert os.environ["PREFECT_API_URL"] == "http://127.0.0.1:4200/api"
