"""Deployments on a real Prefect server: what of a placement reaches the pool, and several
workspaces on one.
"""

from __future__ import annotations

import os
import queue
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import httpx
import pytest
from background import prefect_server, wait_until
from commands import ROOT
from integration.flow_toys import environment, make_toy, processes_of, rlhf
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterExpectedStartTime
from prefect.client.schemas.objects import StateType
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelling
from scripted_server import Answer, post_server

from flows.jobs.deployments import JOB_SETTINGS, deploy_all, deploy_jobs
from flows.jobs.job import Job, job_name
from flows.jobs.run_on_pool import submit
from flows.prefect_server.pools import forgets_leases
from flows.prefect_server.services import embedded_database
from flows.stage import StageSpec
from flows.supervision.processes import run_module
from flows.workspace import workspace_slug
from rlhf_core.config.loading import check_params
from rlhf_core.config.params import Params
from rlhf_core.errors import ConfigError

pytestmark = [pytest.mark.services, pytest.mark.slow]
ASKED = {"gpus": 8, "memory": "512Gi", "node_selector": {"gpu": "h100"}, "time_limit_seconds": 3600}
PARAMS = {
    "pools": {
        "ppo": {
            "pool": "cluster",
            "queue": "long",
            "image": "rlhf:1",
            "cpus": "32",
            "shared_memory": "64Gi",
            **ASKED,
        },
        "sft": "gpu-pool",
    },
    "compute": {"launch": {"ppo": {"processes": 8}}},
    "work_pools": {"cluster": {"limit": 3, "queues": {"long": 2, "default": 5}}},
}
VARIABLES = {
    name: {}
    for name in (*ASKED, "image", "cpus", "shared_memory", "env", "command", "name", "labels")
}
MANUAL = ROOT / "docs" / "operations.md"
NAMES = ("pipeline", "data-watch", "promotion", "gpu-job")


@pytest.fixture(scope="module")
def params() -> Params:
    return check_params(PARAMS)


@pytest.fixture(scope="module")
def client(
    prefect_database: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SyncPrefectClient]:
    """A client of a fresh server with a cluster's pool."""
    with (
        prefect_server(tmp_path_factory.mktemp("prefect"), prefect_database) as url,
        temporary_settings({PREFECT_API_URL: url}),
        pytest.MonkeyPatch.context() as patch,
        get_client(sync_client=True) as client,
    ):
        patch.setenv("PREFECT_API_URL", url)
        template = {
            "job_configuration": {"command": "{{ command }}"},
            "variables": {"properties": VARIABLES},
        }
        client.create_work_pool(
            WorkPoolCreate(name="cluster", type="kubernetes", base_job_template=template)
        )
        yield client


def test_requests_queue_and_limits_reach_the_server_and_an_attempt_is_submitted_once(
    client: SyncPrefectClient, params: Params, tmp_path: Path
) -> None:
    workspace = make_toy(tmp_path / "one", "stages: {}\n")
    deploy_jobs(workspace, params)
    job = Job(StageSpec(workspace, "ppo", grace=1.0), params.pools["ppo"], "a:1")
    run = submit(job)
    assert submit(job).id == run.id and submit(Job(job.spec, job.placement, "a:2")).id != run.id
    assert run.job_variables == {**ASKED, "image": "rlhf:1", "cpus": "32", "shared_memory": "64Gi"}
    assert run.work_queue_name == "long" and set(run.tags) == {"one", "ppo"}
    assert forgets_leases(), "as a server does that nobody has told otherwise"
    assert client.read_work_pool("cluster").concurrency_limit == 3
    assert client.read_work_pool("gpu-pool").concurrency_limit == 1
    queues = {
        queue.name: queue.priority for queue in client.read_work_queues(work_pool_name="cluster")
    }
    assert queues == {"long": 2, "default": 5}


def test_two_workspaces_keep_their_deployments_and_one_of_the_same_name_is_refused(
    client: SyncPrefectClient, params: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there, same = (
        make_toy(tmp_path / name, "stages: {}\n") for name in ("here", "there", "x/here")
    )
    for workspace in (here, there):
        deploy_all(workspace, params)
    for workspace in (here, there):
        for name in NAMES:
            known = client.read_deployments(deployment_filter=_named(f"{name}-{workspace.name}"))
            assert [deployment.parameters["workspace"] for deployment in known] == [
                str(workspace)
            ], name
    (pipeline,) = client.read_deployments(deployment_filter=_named("pipeline-here"))
    assert (
        pipeline.concurrency_options
        and pipeline.concurrency_options.collision_strategy == "CANCEL_NEW"
    )
    (gpu_job,) = client.read_deployments(deployment_filter=_named("gpu-job-here"))
    assert gpu_job.job_variables == {"env": JOB_SETTINGS}, (
        "whichever of the two has deployed it last"
    )
    triggers = {automation.name for automation in client.read_automations()}
    assert {f"rlhf: new data or annotations in {name}" for name in ("here", "there")} <= triggers
    with pytest.raises(ConfigError, match=f"-here .*belongs to the workspace {here}"):
        deploy_jobs(same, params)
    with pytest.raises(ConfigError, match=f"-here .*belongs to the workspace {here}"):
        deploy_all(same, params)
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    shutil.copy(Path(__file__).parents[2] / "prefect.yaml", same)
    variables = environment(PWD=str(same), PREFECT_API_URL=os.environ["PREFECT_API_URL"])
    by_hand = subprocess.run(command, cwd=same, env=variables, capture_output=True, text=True)
    assert by_hand.returncode and f"belongs to the workspace {here};" in by_hand.stderr
    assert "Traceback" not in by_hand.stdout + by_hand.stderr
    # On a server of its own the workspace was moved: nothing goes on in the folders that it was in.
    monkeypatch.setenv("PREFECT_API_DATABASE_CONNECTION_URL", embedded_database(same))
    deploy_jobs(same, params)
    assert {deployment.parameters["workspace"] for deployment in client.read_deployments()} == {
        str(same)
    }


@pytest.mark.parametrize("times", [1, 2], ids=["deployed once", "deployed twice"])
def test_the_server_refuses_parameters_that_a_flow_does_not_take(
    client: SyncPrefectClient, params: Params, tmp_path: Path, times: int
) -> None:
    """Prefect's engine would start such a run, and crash in it."""
    workspace = make_toy(tmp_path / f"form-{times}", "stages: {}\n")
    for _ in range(times):
        deploy_all(workspace, params)
    for name in (*NAMES, "job-cluster"):
        (made,) = client.read_deployments(deployment_filter=_named(f"{name}-{workspace.name}"))
        known = set(made.parameter_openapi_schema["properties"])
        for parameters in ({"nosuch": 1}, {"workspace": 3}, {"workspce": str(workspace)}):
            asked = {"stage": "sft", "outputs": [], "environment": {}} if "job" in name else {}
            with pytest.raises(httpx.HTTPStatusError) as refused:
                client.request(
                    "POST",
                    f"/deployments/{made.id}/create_flow_run",
                    json={"parameters": {**asked, **parameters}},
                )
            reason = refused.value.response.json()["detail"]
            assert refused.value.response.status_code == 409 and "\n" not in reason
            wrong = parameters.get("workspace")
            named = {"workspace"} if wrong else {*parameters, *known}
            assert [name for name in named if f"'{name}'" not in reason] == [], reason


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("pipeline", {"profile": "nosuch"}),
        ("pipeline", {"data": "abc", "promot": False}),
        ("promotion", {"versoin": "3"}),
        ("data-watch", {"settings": {}}),
    ],
)
def test_a_form_that_prefect_has_opened_refuses_in_the_run_and_closes(
    client: SyncPrefectClient,
    params: Params,
    tmp_path: Path,
    name: str,
    parameters: dict[str, Any],
) -> None:
    """`prefect deploy --all` deploys schemas that let unknown parameters pass."""
    workspace = make_toy(tmp_path / f"open-{name}-{len(parameters)}", "stages: {}\n")
    deploy_all(workspace, params)
    file = str(ROOT / "prefect.yaml")
    arguments = ("--no-prompt", "deploy", "--all", "--prefect-file", file)
    opened = run_module(workspace, "prefect", *arguments, PWD=str(workspace))
    assert opened.exit_code == 0, opened.stderr
    (made,) = client.read_deployments(deployment_filter=_named(f"{name}-{workspace.name}"))
    path, body = f"/deployments/{made.id}/create_flow_run", {"parameters": parameters}
    run = client.request("POST", path, json=body).json()["id"]
    # As a worker starts it.
    done = subprocess.run(
        [sys.executable, "-m", "prefect.engine"],
        env=environment(
            PREFECT_API_URL=os.environ["PREFECT_API_URL"],
            PREFECT_HOME=str(tmp_path),
            PREFECT__FLOW_RUN_ID=run,
        ),
        cwd=workspace,
        capture_output=True,
        text=True,
    )
    ended = client.read_flow_run(run).state
    assert ended is not None and ended.is_failed() and ended.name == "UserError", done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    reason = str(ended.message)
    assert "\n" not in reason and "workspace" in reason, reason
    assert [unknown for unknown in parameters if f"'{unknown}'" not in reason] == []
    with pytest.raises(httpx.HTTPStatusError) as refused:
        client.request("POST", path, json=body)
    assert refused.value.response.status_code == 409


REFUSED = {
    "rlhf-pipeline": ("flows.pipeline.flow.rlhf_pipeline", {"settings": {"seeed": 2}}),
    "rlhf-promotion": ("flows.pipeline.registration.promotion_flow", {}),
    "rlhf-data-watch": ("flows.pipeline.data_watch.data_watch", {}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_who_watches_a_refused_run_is_told_why_before_its_end(
    client: SyncPrefectClient, tmp_path: Path, name: str
) -> None:
    """`prefect deployment run --watch` prints the names of a run's events, until the last state."""
    settings = "seed: 1\n" if name == "rlhf-pipeline" else "seeed: 1\n"
    workspace = make_toy(tmp_path / f"refused-{name}", "stages: {}\n", settings)
    (workspace / "dvc.lock").write_text("<<<<<<< HEAD\n")
    module, _, flow = REFUSED[name][0].rpartition(".")
    arguments = {"workspace": str(workspace), **REFUSED[name][1]}
    script = f"from {module} import {flow} as run; run(return_state=True, **{arguments!r})"
    env = environment(PREFECT_API_URL=os.environ["PREFECT_API_URL"], PREFECT_HOME=str(tmp_path))
    subprocess.run([sys.executable, "-c", script], env=env, cwd=workspace, check=True)
    (run,) = [
        run for run in client.read_flow_runs() if run.parameters["workspace"] == str(workspace)
    ]
    resource = f"prefect.flow-run.{run.id}"

    def events() -> list[dict[str, Any]]:
        asked = {"filter": {"any_resource": {"id": [resource]}, "order": "ASC"}}
        found = client.request("POST", "/events/filter", json=asked).json()["events"]
        return [event for event in found if "related" not in event["event"]]

    last = f"prefect.flow-run.{run.state_name}"
    wait_until(lambda: last in [event["event"] for event in events()], 60, last)
    ordered = [event["event"] for event in events()]
    assert ordered.index("rlhf.run.failed") < ordered.index(last), ordered
    (told,) = [event for event in events() if event["event"] == "rlhf.run.failed"]
    assert run.state is not None and run.state.is_failed()
    assert told["resource"]["prefect.resource.name"] == str(run.state.message).partition("\n")[0]


BERLIN = ZoneInfo("Europe/Berlin")


@pytest.mark.parametrize(
    "change", ["2027-03-28", "2027-10-31"], ids=["an hour less", "an hour more"]
)
def test_a_schedule_with_a_timezone_keeps_its_hour_across_a_change_of_the_clocks(
    client: SyncPrefectClient, params: Params, tmp_path: Path, change: str
) -> None:
    workspace = make_toy(tmp_path / f"clocks-{change}", "stages: {}\n")
    own = (ROOT / "prefect.yaml").read_text().replace("timezone: UTC", "timezone: Europe/Berlin")
    (workspace / "prefect.yaml").write_text(own)
    deploy_all(workspace, params)
    (pipeline,) = client.read_deployments(
        deployment_filter=_named(f"pipeline-{workspace_slug(workspace)}")
    )
    day = datetime.fromisoformat(change).replace(tzinfo=BERLIN)
    first, last = day - timedelta(days=3), day + timedelta(days=4)
    week = {"start_time": first.isoformat(), "end_time": last.isoformat(), "min_runs": 50}
    client.request("POST", f"/deployments/{pipeline.id}/schedule", json=week)
    runs = client.read_flow_runs(
        deployment_filter=_named(pipeline.name),
        flow_run_filter=FlowRunFilter(
            expected_start_time=FlowRunFilterExpectedStartTime(after_=first, before_=last)
        ),
    )
    begins = sorted(run.expected_start_time.astimezone(BERLIN) for run in runs)
    days = [first + timedelta(days=number) for number in range(7)]
    assert [f"{time:%m-%d %H:%M}" for time in begins] == [f"{day:%m-%d} 03:00" for day in days]
    assert len({time.utcoffset() for time in begins}) == 2, "the clocks changed among them"


def toy_with_pool(folder: Path, stage: str, pool: str, database: Path) -> Path:
    """Create a used workspace of one stage, whose settings name a pool for PPO."""
    settings = f"seed: 1\npools: {{ppo: {pool}}}\n"
    return make_toy(folder, f"stages: {{{stage}}}\n", settings, database)


def test_a_run_of_a_deployment_finds_the_pools_that_its_settings_name(
    client: SyncPrefectClient, tmp_path: Path, prefect_database: Path
) -> None:
    """What `rlhf deploy` made knows neither trials nor pools that params.yaml has named since."""
    workspace = toy_with_pool(
        tmp_path / "base-of-trials",
        'collect: {cmd: "touch data.txt", outs: [data.txt]}',
        "named-since",
        prefect_database,
    )
    for settings in ({}, {"seed": 2}):
        script = f"from flows.pipeline.flow import rlhf_pipeline as run; run({str(workspace)!r}, settings={settings})"
        env = environment(PREFECT_API_URL=os.environ["PREFECT_API_URL"], PREFECT_HOME=str(tmp_path))
        subprocess.run([sys.executable, "-c", script], env=env, cwd=workspace, check=True)
    (trial,) = (workspace / "workspaces").iterdir()
    for folder in (workspace, trial):
        assert (folder / "data.txt").exists()
        (job,) = client.read_deployments(
            deployment_filter=_named(job_name(folder, "named-since", True))
        )
        assert job.parameters["workspace"] == str(folder)


def test_a_pipeline_is_cancelled_though_no_worker_passes_it_on(
    client: SyncPrefectClient, tmp_path: Path, prefect_database: Path
) -> None:
    """A worker that could not reach the server for half a minute passes on no cancellation."""
    workspace = make_toy(
        tmp_path / "cancelled-late",
        'stages: {collect: {cmd: "touch began; sleep 1000", outs: [data.txt]}}\n',
        prefect_database=prefect_database,
    )
    env = environment(PREFECT_API_URL=os.environ["PREFECT_API_URL"], PREFECT_HOME=str(tmp_path))
    command = [sys.executable, "-m", "flows.pipeline.flow", str(workspace)]
    process = subprocess.Popen(command, env=env, cwd=workspace)
    try:
        wait_until((workspace / "began").exists, 240, "the stage")
        (run,) = [
            run for run in client.read_flow_runs() if run.parameters["workspace"] == str(workspace)
        ]
        client.set_flow_run_state(run.id, Cancelling())
        assert process.wait(120) == 1
    finally:
        process.kill()
    assert client.read_flow_run(run.id).state_type == StateType.CANCELLED
    assert processes_of(workspace) == []


def test_a_run_that_waits_says_for_what_in_its_log(
    client: SyncPrefectClient, tmp_path: Path, prefect_database: Path
) -> None:
    """One waits for a worker of a second pool, the next for the workspace."""
    ppo = 'ppo: {cmd: "echo done > policy.txt", outs: [policy.txt]}'
    workspace = toy_with_pool(tmp_path / "waits", ppo, "nobody", prefect_database)
    url = os.environ["PREFECT_API_URL"]
    deployed = rlhf("deploy", cwd=workspace, PREFECT_API_URL=url)
    starts = [
        f"prefect worker start --pool {pool} --type process" for pool in ("pipelines", "nobody")
    ]
    assert deployed.returncode == 0, deployed.stderr
    assert [line.strip() for line in deployed.stdout.splitlines()[-2:]] == starts

    def logged(text: str) -> bool:
        return any(text in record.message for record in client.read_logs(limit=200))

    env = environment(PREFECT_API_URL=url, PREFECT_HOME=str(tmp_path))
    command = [sys.executable, "-m", "flows.pipeline.flow", str(workspace)]
    processes = [subprocess.Popen(command, env=env, cwd=workspace)]
    try:
        missing = (
            f"ppo: no worker is free, waiting for one of nobody; none is online, and `{starts[1]}`"
        )
        wait_until(lambda: logged(missing), 240, "word of the missing worker")
        processes.append(subprocess.Popen(command, env=env, cwd=workspace))
        wait_until(lambda: logged(f"(pid {processes[0].pid},"), 120, "word of the other run")
    finally:
        for process in reversed(processes):
            process.send_signal(signal.SIGINT)
            process.wait(120)
    assert processes_of(workspace) == []


def test_neither_trials_of_one_name_nor_names_that_end_alike_meet(
    client: SyncPrefectClient, params: Params, tmp_path: Path
) -> None:
    folders = (
        "ann",
        "ben",
        "my-ben",
        "ann/workspaces/demo-1a2b",
        "ben/workspaces/demo-1a2b",
        "demo-1a2b",
    )
    workspaces = [make_toy(tmp_path / folder, "stages: {}\n") for folder in folders]
    for workspace in (*workspaces, *reversed(workspaces)):
        deploy_jobs(workspace, params)
    assert len({job_name(workspace, "gpu-pool", True) for workspace in workspaces}) == len(folders)
    for workspace in workspaces:
        (job,) = client.read_deployments(
            deployment_filter=_named(job_name(workspace, "gpu-pool", True))
        )
        assert job.parameters["workspace"] == str(workspace)


def _named(name: str):  # type: ignore[no-untyped-def]
    from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName

    return DeploymentFilter(name=DeploymentFilterName(any_=[name]))


RUNS_AND_EVENTS = """
from prefect import flow
from prefect.events import emit_event
from prefect.states import Completed, Failed

for name, message in {ends}.items():
    flow(name=name)(lambda message=message: Failed(name="GateFailed", message=message))(return_state=True)
flow(name="rlhf-pipeline")(lambda: Completed())()
resource = {{"prefect.resource.id": "rlhf.registered-model.m", "prefect.resource.name": "m"}}
for event in ("rlhf.approval.requested", "rlhf.approval.declined", "rlhf.champion.changed"):
    emit_event(event, resource, payload={{"version": "3"}})
"""


def test_the_alerts_of_the_manual_tell_of_failed_runs_requests_and_champions(
    client: SyncPrefectClient, tmp_path: Path
) -> None:
    (script,) = [
        code
        for code in re.findall(r"```python\n(.*?)```", MANUAL.read_text(), re.S)
        if "rlhf-alerts" in code
    ]
    told: queue.Queue[str] = queue.Queue()

    def hook(_: str, body: dict[str, Any], __: dict[str, str]) -> Answer:
        told.put(body["text"])
        return 200, {}

    ends = {
        "rlhf-pipeline": 'the policy gate failed: "kl" is 3, required ≤ 2',
        "rlhf-stage": "a job's own",
        "other": "end",
    }
    env = environment(PREFECT_API_URL=os.environ["PREFECT_API_URL"], PREFECT_HOME=str(tmp_path))
    with post_server(hook) as address:
        script = script.replace("https://hooks.slack.com/services/…", f"{address}/")
        # A process sends its events to the first server that it has spoken to.
        for code in (script, RUNS_AND_EVENTS.format(ends=ends)):
            subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, check=True)
        texts = sorted(told.get(timeout=120).partition(": ")[2] for _ in range(3))
    failed = f"GateFailed: {ends['rlhf-pipeline']}"
    assert (
        texts == sorted([failed, "rlhf.approval.requested", "rlhf.champion.changed"])
        and told.empty()
    )
