"""A worker in a network namespace of its own loses the server for a minute, and neither work nor
result is lost.
"""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest
from background import prefect_server, wait_until
from faults.network import second_host
from integration.flow_toys import begin, processes_of
from integration.remote_toys import Host, caller_environment, make_clone, params

pytestmark = [pytest.mark.services, pytest.mark.slow, pytest.mark.timeout(1200)]
CUT_SECONDS = 60
STEP_SECONDS = 1.0


@pytest.mark.parametrize(
    "steps", [100, 30], ids=["the job outlasts the cut", "the job ends during the cut"]
)
def test_a_minute_without_the_server_costs_no_work_and_no_result(
    tmp_path: Path, steps: int
) -> None:
    with second_host() as (ours, other), prefect_server(tmp_path / "server", address=ours) as url:
        host = Host(tmp_path / "worker-home", url, other.prefix)
        clone = make_clone(
            tmp_path / "clone", tmp_path / "remote", params(steps, retries=2, deliver_seconds=60)
        )
        reach = {"NO_PROXY": f"{ours},127.0.0.1"}
        with host.worker(TOY_SECONDS=str(STEP_SECONDS), **reach):
            run = begin("run", cwd=clone, **caller_environment(url, tmp_path), **reach)
            jobs = host.home / ".rlhf" / "jobs"
            wait_until(
                lambda: any(_step(file) >= 5 for file in jobs.glob("*/work/ppo/step")),
                240,
                "step of PPO",
            )
            other.unplug()
            time.sleep(CUT_SECONDS)
            other.plug()
            code = run.wait(600)
        output = (clone / "out.log").read_text() + (host.home / "worker.log").read_text()
        assert code == 0, output
        assert len(host.starts) == 1, output
        assert (clone / "report.html").read_text() == 'done x\n{"reward": 1.5}'
        log = (clone / ".rlhf" / "logs" / "ppo.log").read_text()
        assert [line for line in log.splitlines() if line.startswith("ppo: ")] == [
            f"ppo: {step}/{steps}" for step in range(1, steps + 1)
        ]
        runs = httpx.post(f"{url}/flow_runs/filter", json={}, trust_env=False, timeout=60).json()
        assert [run["state_type"] for run in runs if run["name"] == "clone · ppo"] == ["COMPLETED"]
        assert processes_of(clone) == []


def _step(file: Path) -> int:
    text = file.read_text() if file.exists() else ""
    return int(text or 0)
