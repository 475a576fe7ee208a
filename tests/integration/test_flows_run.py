"""`rlhf run` and `rlhf up` on small pipelines with a real server, worker and DVC."""

from __future__ import annotations

import json
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from background import wait_until
from integration.flow_toys import begin, environment, make_toy, processes_of, rlhf

from flows.workspace import workspace_slug as slug

pytestmark = pytest.mark.services
EVIDENCE = '{"passed": false, "conditions": [{"metric": "accuracy", "value": 0.5, "bound": 0.6, "passed": false}]}'
GATED = f"""
stages:
  collect: {{cmd: echo x > raw.txt, outs: [raw.txt]}}
  gate-reward:
    cmd: >-
      mkdir -p gates && echo '{EVIDENCE}' > gates/reward.json && exit 3
    deps: [raw.txt]
    outs: [gates/reward.json, gates/reward.pass]
  ppo: {{cmd: echo p > policy.txt, deps: [gates/reward.pass], outs: [policy.txt]}}
  report: {{cmd: echo report > report.html, deps: [policy.txt], outs: [report.html]}}
"""
POOLED = """
stages:
  collect: {cmd: echo x > raw.txt, outs: [raw.txt]}
  ppo: {cmd: python train.py 4, deps: [raw.txt], outs: [policy.txt]}
  report: {cmd: cat policy.txt > report.html, deps: [policy.txt], outs: [report.html]}
"""
PARAMS = "seed: 1\nprofile: tiny\npools: {ppo: gpu-pool}\n"


def rows(workspace: Path, query: str) -> list[tuple[str, ...]]:
    database = workspace / ".rlhf" / "prefect" / "prefect.db"
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        return connection.execute(query).fetchall()


@pytest.mark.slow
def test_a_failed_gate_is_named_not_retried_and_the_report_is_written(
    tmp_path: Path, prefect_database: Path
) -> None:
    toy = make_toy(tmp_path, GATED, prefect_database=prefect_database)
    answer = rlhf("run", cwd=toy)
    assert answer.returncode == 3, answer.stdout + answer.stderr
    assert "GateFailed: gate-reward: accuracy is 0.5, required 0.6" in answer.stderr
    assert any(
        line.split() == ["FAIL", "accuracy", "0.5", "0.6"] for line in answer.stderr.splitlines()
    )
    assert (toy / "report.html").exists() and not (toy / "policy.txt").exists()
    assert rows(toy, "select state_name from flow_run") == [("GateFailed",)]
    assert ("gate-reward", 1) in rows(toy, "select name, run_count from task_run")
    keys = {f"{name}-{slug(toy)}" for name in ("stages", "gate-reward", "report")}
    assert keys <= {row[0] for row in rows(toy, "select key from artifact")}
    assert processes_of(toy) == []


@pytest.mark.slow
def test_a_stage_on_the_pool_runs_there_and_a_second_computes_nothing(
    tmp_path: Path, prefect_database: Path
) -> None:
    toy = make_toy(tmp_path, POOLED, PARAMS, prefect_database)
    first = rlhf("run", cwd=toy)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "job of the work pool gpu-pool, on this machine" in first.stdout
    assert (toy / "report.html").read_text() == "done"
    query = "select r.name, {} from flow_run r join flow f on f.id = r.flow_id where f.name = '{}'"
    assert rows(toy, query.format("state_type", "rlhf-stage")) == [
        (f"{toy.name} · ppo", "COMPLETED")
    ]
    (pipeline,) = rows(toy, query.format("r.tags", "rlhf-pipeline"))
    assert re.fullmatch(rf"{toy.name} · tiny · 2\d{{3}}-\d\d-\d\d \d\d:\d\d:\d\d", pipeline[0])
    assert set(json.loads(pipeline[1])) == {toy.name, "tiny"}
    # A GPU on which the stage would not fit refuses only what has to be computed.
    (toy / "params.yaml").write_text(PARAMS + "plan: {gpu_memory_gb: 1.05}\n")
    second = rlhf("run", cwd=toy)
    assert second.returncode == 0 and "3 cached" in second.stdout and " ran " not in second.stdout
    assert (toy / "starts.log").read_text() == "0\n"
    assert processes_of(toy) == []


@pytest.mark.slow
def test_a_job_that_cannot_fit_its_gpu_is_not_submitted(
    tmp_path: Path, prefect_database: Path
) -> None:
    toy = make_toy(tmp_path, POOLED, PARAMS + "plan: {gpu_memory_gb: 1.05}\n", prefect_database)
    answer = rlhf("run", cwd=toy)
    assert answer.returncode == 2, answer.stdout + answer.stderr
    refusals = [line for line in answer.stderr.splitlines() if "ppo does not fit: " in line]
    assert len(refusals) == 1 and "of 1.05 GiB" in refusals[0] and "UserError" in refusals[0]
    assert (toy / "raw.txt").exists() and not (toy / "starts.log").exists()
    assert rows(toy, "select state_name from flow_run") == [("UserError",)]
    assert ("ppo", 1) in rows(toy, "select name, run_count from task_run")


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory, prefect_database: Path) -> Iterator[Path]:
    """Run `rlhf up` in a toy workspace."""
    toy = make_toy(tmp_path_factory.mktemp("up"), POOLED, PARAMS, prefect_database)
    process = begin("up", cwd=toy)
    try:
        wait_until(
            lambda: "Ctrl-C" in (toy / "out.log").read_text() or process.poll() is not None,
            400,
            "services",
        )
        assert process.poll() is None, (toy / "out.log").read_text()
        yield toy
    finally:
        process.terminate()
        process.wait(120)
        assert processes_of(toy) == []


def prefect(lasting: Path, *arguments: str) -> None:
    """Run a command of Prefect's own command line against the server of `rlhf up`."""
    url = json.loads((lasting / ".rlhf" / "services.json").read_text())["api_url"]
    env = environment(PREFECT_API_URL=url, PREFECT_HOME=str(lasting / "client"), DO_NOT_TRACK="1")
    command = [sys.executable, "-m", "prefect", *arguments]
    subprocess.run(command, env=env, check=True, capture_output=True, timeout=400)


@pytest.mark.slow
def test_new_annotations_are_announced_and_start_a_run(lasting: Path) -> None:
    """The last run, by its dvc.lock, has read other files; nobody starts a pipeline here but the
    automation.
    """
    read = {"path": ".fingerprints/sources.txt", "hash": "md5", "md5": "0" * 32, "size": 1}
    lock = {"schema": "2.0", "stages": {"collect": {"cmd": "echo x", "deps": [read]}}}
    (lasting / "dvc.lock").write_text(json.dumps(lock))
    annotations = lasting / "data" / "annotations"
    annotations.mkdir(parents=True)
    (annotations / "first.jsonl").write_text('{"prompt": "p", "chosen": "a", "rejected": "b"}\n')
    watch = f"rlhf-data-watch/data-watch-{slug(lasting)}"
    prefect(lasting, "deployment", "run", watch, "--param", "settle_seconds=0", "--watch")
    query = """select count(*) from flow_run r join flow f on f.id = r.flow_id
        where f.name = 'rlhf-pipeline' and r.state_type = 'COMPLETED' and r.created_by like '%AUTOMATION%'"""
    wait_until(lambda: rows(lasting, query)[0][0] == 1, 400, "run by the automation")
    assert rows(lasting, "select event from events where event like 'rlhf.%'") == [
        ("rlhf.data.added",)
    ]
    assert (lasting / "report.html").read_text() == "done"


@pytest.mark.slow
def test_a_schedule_creates_runs_that_complete(lasting: Path) -> None:
    prefect(
        lasting,
        "deployment",
        "schedule",
        "create",
        f"rlhf-pipeline/pipeline-{slug(lasting)}",
        "--interval",
        "15",
    )
    query = "select count(*) from flow_run where auto_scheduled = 1 and state_type = 'COMPLETED'"
    wait_until(lambda: rows(lasting, query)[0][0] != 0, 400, "completed scheduled run")
    tags = "select tags from flow_run where auto_scheduled = 1 and state_type = 'COMPLETED'"
    assert {lasting.name, "tiny"} <= set(json.loads(rows(lasting, tags)[0][0]))
    assert (lasting / "report.html").read_text() == "done"


@pytest.mark.slow
def test_the_automations_and_the_deployments_are_on_the_server(lasting: Path) -> None:
    deployments = {row[0] for row in rows(lasting, "select name from deployment")}
    assert deployments == {
        f"{name}-{slug(lasting)}" for name in ("pipeline", "data-watch", "gpu-job", "promotion")
    }
    automations = {
        row[0] for row in rows(lasting, "select name from automation where name like 'rlhf:%'")
    }
    new_data = f"rlhf: new data or annotations in {slug(lasting)}"
    assert automations == {"rlhf: runs without a heartbeat have crashed", new_data}


@pytest.mark.slow
def test_mlflow_starts_no_processes_for_jobs_that_nothing_here_submits(lasting: Path) -> None:
    commands = [" ".join(process.cmdline()) for process in processes_of(lasting)]
    assert any("mlflow server" in command for command in commands)
    assert not [command for command in commands if "mlflow.server.jobs" in command]
