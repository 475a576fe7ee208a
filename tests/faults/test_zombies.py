"""A machine dies: no process is left to report its runs, and the server's automation frees their slots."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from lasting import ACTIVE, LastingServer
from prefect.client.schemas.objects import StateType
from toys import assert_nothing_lost, begin, in_the_middle, processes_of, training_toy

pytestmark = [pytest.mark.services, pytest.mark.slow, pytest.mark.timeout(1200)]


def kill_at_once(toy: Path, run: subprocess.Popen[bytes]) -> None:
    """Suspend every process before killing any, so that none notices the death of another."""
    everything = [psutil.Process(run.pid), *processes_of(toy)]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for process in everything:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)


def test_runs_of_a_dead_machine_are_marked_as_crashed_and_the_next_run_resumes(tmp_path: Path) -> None:
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
        assert "its job on gpu-pool ended as Crashed: no heartbeat for 90 s" in (toy / "out.log").read_text()
        assert_nothing_lost(toy)
        assert processes_of(toy) == [] and server.runs(ACTIVE) == []
        states = {r.id: (r.state_type, r.state.message if r.state else "") for r in server.runs()}
        assert [states[r.id] for r in held] == [(StateType.CRASHED, "no heartbeat for 90 s")] * 2
    finally:
        server.kill()
