"""Pipelines on a Prefect server with PostgreSQL and a login, with a worker of their own or of
somebody else.
"""

from __future__ import annotations

import base64
import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from background import wait_until
from integration.flow_toys import begin, environment, find_process, make_toy, processes_of, rlhf
from servers.conftest import Servers

pytestmark = [pytest.mark.servers, pytest.mark.timeout(3600)]
TRAINING = """
stages:
  ppo: {{cmd: "{python} train.py {steps}", deps: [train.py], outs: [policy.txt]}}
"""
DATA = """
  collect: {cmd: "touch collecting; until test -e released; do sleep 0.1; done; echo data > data.txt", outs: [data.txt]}
"""
UNTIL_RELEASED = """
import pathlib, time
work = pathlib.Path("work/ppo"); work.mkdir(parents=True, exist_ok=True)
with open("starts.log", "a") as log: log.write("began\\n")
(work / "step").write_text("1")
while not pathlib.Path("released").exists(): time.sleep(0.1)
pathlib.Path("policy.txt").write_text("done")
"""
NAMES = ("PREFECT_API_URL", "PREFECT_API_AUTH_STRING")


@pytest.fixture
def login(servers: Servers) -> dict[str, str]:
    servers.require("prefect")
    return {name: servers.environment[name] for name in NAMES}


def training(folder: Path, pool: str, steps: int) -> Path:
    """A pipeline in ``folder``, whose name is the workspace's, of which a server has one only."""
    dvc_yaml = TRAINING.format(python=sys.executable, steps=steps)
    return make_toy(folder, dvc_yaml, f"seed: 1\npools: {{ppo: {pool}}}\n")


def ask(login: dict[str, str], path: str, body: Any) -> Any:
    """The answer of the server's own interface."""
    token = base64.b64encode(login["PREFECT_API_AUTH_STRING"].encode()).decode()
    headers = {"Authorization": f"Basic {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(
        f"{login['PREFECT_API_URL']}/{path}", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def states(login: dict[str, str], pool: str) -> list[str]:
    """The states of the jobs of a pool."""
    body = {"work_pools": {"name": {"any_": [pool]}}}
    return [run["state"]["type"] for run in ask(login, "flow_runs/filter", body)]


def online(login: dict[str, str], pool: str) -> list[str]:
    """The workers of a pool that are online; the pool does not exist before its first worker."""
    try:
        answer = ask(login, f"work_pools/{pool}/workers/filter", {})
    except urllib.error.HTTPError:
        return []
    return [worker["name"] for worker in answer if worker["status"] == "ONLINE"]


@contextmanager
def other_worker(
    pool: str, login: dict[str, str], folder: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A worker that no run has started."""
    command = [
        sys.executable,
        "-m",
        "prefect",
        "worker",
        "start",
        "--pool",
        pool,
        "--type",
        "process",
    ]
    command += ["--install-policy", "never", "--limit", "1"]
    with (folder / "worker.log").open("wb") as log:
        process = subprocess.Popen(
            command, env=environment(**login), stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def test_a_pipeline_runs_on_a_worker_of_the_server(login: dict[str, str], tmp_path: Path) -> None:
    """The pool has two workers and a limit of one job, which the run says."""
    toy = training(tmp_path / tmp_path.name, "theirs", 3)
    with (toy / "params.yaml").open("a") as stream:
        stream.write("work_pools: {theirs: {limit: 1}}\n")
    (tmp_path / "second").mkdir()
    with (
        other_worker("theirs", login, tmp_path) as worker,
        other_worker("theirs", login, tmp_path / "second") as second,
    ):
        wait_until(lambda: len(online(login, "theirs")) == 2, 900, "two workers")
        ended = rlhf("run", cwd=toy, timeout=1800, **login)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert worker.poll() is None and second.poll() is None
    assert (
        "the work pool theirs has 2 workers, but its limit lets 1 job(s) run at a time"
        in ended.stdout
    )
    assert (toy / "policy.txt").read_text() == "done" and states(login, "theirs")[-1] == "COMPLETED"


@pytest.mark.parametrize("moment", ["while a job starts", "before a job is submitted"])
def test_an_outage_of_45_s_costs_no_retry(
    servers: Servers, login: dict[str, str], tmp_path: Path, moment: str
) -> None:
    toy = training(tmp_path / tmp_path.name, "own", 5)
    if moment == "before a job is submitted":
        (toy / "dvc.yaml").write_text(
            (toy / "dvc.yaml").read_text().replace("[train.py]", "[train.py, data.txt]") + DATA
        )
    run = begin("run", cwd=toy, **login)
    try:
        if moment == "while a job starts":
            wait_until(
                lambda: any(state == "PENDING" for state in _known(login, "own")),
                900,
                "submitted job",
            )
        else:
            wait_until((toy / "collecting").exists, 900, "the stage before")
        servers.call("kill", "prefect")
        (toy / "released").touch()
        time.sleep(45)
        servers.call("up", "prefect")
        assert run.wait(1500) == 0, (toy / "out.log").read_text()
    finally:
        if run.poll() is None:
            run.kill()
    assert (toy / "starts.log").read_text() == "0\n", "the stage began once"
    assert "trying again" not in (toy / "out.log").read_text() and processes_of(toy) == []
    assert "Traceback" not in (toy / ".rlhf" / "logs" / "worker-own.log").read_text()


def test_the_dead_worker_of_one_run_ends_no_job_of_another(
    login: dict[str, str], tmp_path: Path
) -> None:
    """Both pipelines use one pool, in which each has a job on a worker of its own."""
    first, second = (
        training(tmp_path / name, "shared", 0) for name in ("one-of-two", "other-of-two")
    )
    for toy in (first, second):
        (toy / "train.py").write_text(
            f"# {toy.name}: another computation, else one job would do for both\n" + UNTIL_RELEASED
        )
    with (second / "params.yaml").open("a") as stream:
        stream.write(
            "work_pools: {shared: {limit: 2}}\n"
        )  # the first run's worker takes one job at a time

    def starts(toy: Path) -> int:
        log = toy / "starts.log"
        return len(log.read_text().splitlines()) if log.exists() else 0

    runs = [begin("run", cwd=first, **login)]
    try:
        wait_until(lambda: starts(first) == 1, 900, "first job")
        with other_worker("shared", login, tmp_path):
            runs.append(begin("run", cwd=second, **login))
            wait_until(lambda: starts(second) == 1, 900, "second job")
            find_process(first, "worker", "start").kill()
            wait_until(lambda: starts(first) == 2, 900, "second start of the first job")
            assert runs[1].poll() is None and states(login, "shared").count("RUNNING") == 2
            for toy in (first, second):
                (toy / "released").touch()
            assert [run.wait(900) for run in runs] == [0, 0]
    finally:
        for run in runs:
            if run.poll() is None:
                run.kill()
    assert (starts(first), starts(second)) == (2, 1), "the other stage was not disturbed"
    assert (
        "exited" in (first / "out.log").read_text()
        and "trying again" not in (second / "out.log").read_text()
    )
    assert [processes_of(toy) for toy in (first, second)] == [[], []]


def _known(login: dict[str, str], pool: str) -> list[str]:
    """The states of a pool's jobs; none as long as the pool does not exist."""
    try:
        return states(login, pool)
    except urllib.error.HTTPError:
        return []
