"""An external Prefect server: it is killed, or the machine that uses it dies, and the next run goes
on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from background import wait_for_answer
from faults.toys import assert_nothing_lost, in_the_middle, set_pace, training_toy
from integration.flow_toys import begin, processes_of
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelling

from flows.prefect_server.pools import forgets_leases
from flows.prefect_server.services import LOOPBACK, claim_port
from flows.supervision.processes import CHILD_SETTINGS

ACTIVE = [StateType.RUNNING, StateType.PENDING, StateType.CANCELLING]


class LastingServer:
    """A server on a port of its own; ``env`` points clients at it."""

    def __init__(self, folder: Path) -> None:
        self.port = claim_port(None, "the Prefect server")
        self.url = f"http://{LOOPBACK}:{self.port}/api"
        self.env = {"PREFECT_API_URL": self.url, "PREFECT_HOME": str(folder / "home")}
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start or restart the server on its database, and wait until it answers."""
        database = f"sqlite+aiosqlite:///{self.folder}/prefect.db"
        env = {
            **os.environ,
            **CHILD_SETTINGS,
            **self.env,
            "PREFECT_API_DATABASE_CONNECTION_URL": database,
        }
        env.pop("PREFECT_API_URL")
        command = [
            sys.executable,
            "-m",
            "prefect",
            "server",
            "start",
            "--host",
            LOOPBACK,
            "--port",
            str(self.port),
        ]
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, env=env, stdout=log, stderr=log, start_new_session=True
            )
        wait_for_answer(f"{self.url}/health", self.process, self.folder / "server.log", 600)

    def kill(self) -> None:
        """Kill the server with SIGKILL."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def runs(self, types: list[StateType] | None = None) -> list[FlowRun]:
        """Return the flow runs on the server, all or those in states of ``types``."""
        wanted = (
            FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=types)))
            if types
            else None
        )
        with (
            temporary_settings({PREFECT_API_URL: self.url}),
            get_client(sync_client=True) as client,
        ):
            return client.read_flow_runs(flow_run_filter=wanted)


@pytest.mark.services
@pytest.mark.slow
def test_a_run_survives_ten_seconds_without_an_external_server(tmp_path: Path) -> None:
    toy, server = training_toy(tmp_path / "toy", pace=1.0), LastingServer(tmp_path / "server")
    try:
        server.start()
        run = in_the_middle(toy, **server.env)
        server.kill()
        time.sleep(10)
        server.start()
        assert run.wait(600) == 0, (toy / "out.log").read_text()
        assert_nothing_lost(toy, faults=0)
        assert processes_of(toy) == [] and server.runs(ACTIVE) == []
        assert "Traceback" not in worker_log(toy)
    finally:
        server.kill()


@pytest.mark.services
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_after_minutes_without_a_server_runs_go_on_and_a_job_can_be_cancelled(
    tmp_path: Path,
) -> None:
    toy, server = training_toy(tmp_path / "toy", pace=1.0), LastingServer(tmp_path / "server")
    try:
        server.start()
        run = in_the_middle(toy, **server.env)
        set_pace(toy, 1200.0)
        server.kill()
        time.sleep(150)
        server.start()
        time.sleep(20)  # the server looks for silent runs meanwhile
        (job,) = [each for each in server.runs(ACTIVE) if each.parent_task_run_id]
        with (
            temporary_settings({PREFECT_API_URL: server.url}),
            get_client(sync_client=True) as client,
        ):
            client.set_flow_run_state(job.id, Cancelling())
        assert run.wait(600) != 0
        assert processes_of(toy) == [] and server.runs(ACTIVE) == []
        assert "Traceback" not in worker_log(toy)
    finally:
        server.kill()


@pytest.mark.services
@pytest.mark.slow
def test_a_restarted_server_knows_which_runs_hold_a_limit(tmp_path: Path) -> None:
    """Prefect ends a run of a deployment whose lease its server has forgotten."""
    server = LastingServer(tmp_path / "server")
    try:
        server.start()
        with (
            temporary_settings({PREFECT_API_URL: server.url}),
            get_client(sync_client=True) as client,
        ):
            assert not forgets_leases()
            client.upsert_global_concurrency_limit_by_name("one-at-a-time", 1)
            held = client.increment_concurrency_slots_with_lease(
                ["one-at-a-time"], 1, "concurrency", 300.0
            )
            server.kill()
            server.start()
            client.renew_concurrency_lease(held.json()["lease_id"], 300.0)
    finally:
        server.kill()


def worker_log(toy: Path) -> str:
    """What the worker of the toy's pool has written."""
    return (toy / ".rlhf" / "logs" / "worker-gpu-pool.log").read_text()


def kill_at_once(toy: Path, run: subprocess.Popen[bytes]) -> None:
    """Suspend every process before killing any, so that none notices the death of another."""
    everything = [psutil.Process(run.pid), *processes_of(toy)]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for process in everything:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)


@pytest.mark.services
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_runs_of_a_dead_machine_are_marked_as_crashed_and_the_next_run_resumes(
    tmp_path: Path,
) -> None:
    toy, server = training_toy(tmp_path / "toy", pace=1.0), LastingServer(tmp_path / "server")
    try:
        server.start()
        run = in_the_middle(toy, **server.env)
        kill_at_once(toy, run)
        run.wait()
        held = server.runs(ACTIVE)
        assert {run.state_type for run in held} == {StateType.RUNNING} and len(held) == 2
        again = begin("run", cwd=toy, **server.env)
        assert again.wait(600) == 0, (toy / "out.log").read_text()
        assert (
            "waiting for one of gpu-pool" in (toy / "out.log").read_text()
        )  # the dead job's place is taken
        assert_nothing_lost(toy)
        assert processes_of(toy) == [] and server.runs(ACTIVE) == []
        states = {r.id: (r.state_type, r.state.message if r.state else "") for r in server.runs()}
        assert [states[r.id] for r in held] == [(StateType.CRASHED, "no heartbeat for 300 s")] * 2
    finally:
        server.kill()
