"""A stage on a worker that does not see the workspace: two clones, a DVC remote, a worker with its
own home.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from background import prefect_server
from integration.flow_toys import processes_of, rlhf
from integration.remote_toys import Host, caller_environment, make_clone, params

from flows.jobs.transfer import restore_result
from flows.stage import StageSpec

pytestmark = [pytest.mark.services, pytest.mark.timeout(1500), pytest.mark.slow]
PATIENCE = 480


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory, prefect_database: Path) -> Iterator[Host]:
    """Run a server and, with another home in another folder, a worker of the pool."""
    base = tmp_path_factory.mktemp("away")
    with prefect_server(base / "server", prefect_database) as url:
        host = Host(base / "worker-home", url)
        with host.worker():
            yield host


def jobs(host: Host) -> list[str]:
    """Return the states of all jobs on the server, oldest first."""
    runs = httpx.post(
        f"{host.url}/flow_runs/filter", json={"sort": "START_TIME_ASC"}, timeout=60
    ).json()
    return [run["state_type"] for run in runs if run["name"].endswith(" · ppo")]


def test_a_job_elsewhere_loses_nothing_when_the_remote_is_gone_and_clones_find_it(
    host: Host, tmp_path: Path
) -> None:
    remote, gone = tmp_path / "remote", tmp_path / "remote-elsewhere"
    one = make_clone(tmp_path / "one", remote, params())
    outage = caller_environment(host.url, tmp_path)
    host.script_at_the_end.write_text(f"mv {remote} {gone} && touch {remote}\n")

    failed = rlhf("run", cwd=one, timeout=PATIENCE, **outage)
    assert failed.returncode == 1, failed.stdout + failed.stderr
    assert (
        "its result could not be pushed" in failed.stderr
        and str(host.home / ".rlhf/jobs") in failed.stderr
    )
    assert len(host.starts) == 1 and host.starts[0].startswith(f"0 {host.home}/.rlhf/jobs/ppo-")
    assert not (one / "policy.txt").exists()

    host.script_at_the_end.unlink()
    remote.unlink()
    gone.rename(remote)
    again = rlhf("run", cwd=one, timeout=PATIENCE, **outage)
    assert again.returncode == 0, again.stdout + again.stderr
    assert len(host.starts) == 1, "the stage was trained a second time"
    assert (one / "report.html").read_text() == 'done x\n{"reward": 1.5}'
    assert json.loads((one / "metrics.json").read_text()) == {"reward": 1.5}
    assert "ppo: 4/4" in (one / ".rlhf/logs/ppo.log").read_text()
    assert jobs(host) == ["FAILED", "COMPLETED"]
    assert list((host.home / ".rlhf/jobs").iterdir()) == []

    assert processes_of(one) == []

    two = make_clone(tmp_path / "two", remote, params())
    subprocess.run(
        [sys.executable, "-m", "dvc", "repro", "-q", "-s", "collect"], cwd=two, check=True
    )
    restored = restore_result(StageSpec(two, "ppo", ("policy.txt",)))
    assert restored is not None and restored.ok and (two / "policy.txt").read_text() == "done x\n"


def test_a_remote_that_is_gone_before_the_job_costs_no_training(host: Host, tmp_path: Path) -> None:
    remote, before = tmp_path / "remote", len(host.starts)
    clone = make_clone(tmp_path / "clone", remote, params())
    remote.touch()
    answer = rlhf("run", cwd=clone, timeout=PATIENCE, **caller_environment(host.url, tmp_path))
    assert answer.returncode == 1, answer.stdout + answer.stderr
    (message,) = (line for line in answer.stderr.splitlines() if line.startswith("rlhf: "))
    assert (
        "ppo: the stage cannot be submitted to the work pool away: " in message
        and str(remote) in message
    )
    assert len(host.starts) == before


def test_without_a_remote_the_run_is_refused_in_one_line(host: Host, tmp_path: Path) -> None:
    clone = make_clone(tmp_path / "clone", None, params())
    answer = rlhf("run", cwd=clone, **caller_environment(host.url, tmp_path))
    assert answer.returncode == 2 and answer.stderr.count("\n") == 1
    assert "pools.ppo has shared: false, but no DVC remote is set" in answer.stderr


def test_an_embedded_server_is_refused_since_no_other_host_can_reach_it(tmp_path: Path) -> None:
    clone = make_clone(tmp_path / "clone", tmp_path / "remote", params())
    answer = rlhf("run", cwd=clone)
    assert answer.returncode == 2 and answer.stderr.count("\n") == 1
    assert "set PREFECT_API_URL" in answer.stderr
