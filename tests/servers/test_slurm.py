"""The scripts of infra/slurm on a real Slurm cluster of two nodes on this machine (slurm.sh)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import pytest
from integration.flow_toys import ROOT, environment, make_toy, rlhf, wait_until
from servers.conftest import Servers
from servers.test_prefect import ask, login, training

__all__ = ["login"]
pytestmark = [pytest.mark.servers, pytest.mark.timeout(3600)]
SCRIPT = Path(__file__).with_name("slurm.sh")
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "DEADLINE"}
# A training that saves its step when it is stopped and says so, as the stages of the pipeline do.
PREEMPTIBLE = """
import json, pathlib, signal, sys, time
saved = pathlib.Path("work/ppo/step"); saved.parent.mkdir(parents=True, exist_ok=True)
start = int(saved.read_text()) if saved.exists() else 0
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
with open("starts.log", "a") as log: log.write(f"{start}\\n")
for step in range(start, int(sys.argv[1])):
    time.sleep(0.5)
    saved.write_text(str(step + 1))
    if stopped:
        outcome = pathlib.Path(".rlhf/outcomes/ppo.json"); outcome.parent.mkdir(parents=True, exist_ok=True)
        outcome.write_text(json.dumps({"exit_code": 75}))
        sys.exit(75)
pathlib.Path("policy.txt").write_text("done")
"""


class Slurm:
    """The cluster whose configuration is in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.env = {"SLURM_CONF": str(folder / "slurm.conf")}

    def call(self, *command: str | Path, **env: str) -> str:
        """Run a command of Slurm in the repository and return what it printed."""
        variables = environment(**self.env, **env)
        ended = subprocess.run([*map(str, command)], cwd=ROOT, env=variables, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.strip()

    def submit(self, *words: str | Path, **env: str) -> str:
        """Submit a job and return its number."""
        return self.call("sbatch", "--parsable", *words, **env)

    def state(self, job: str) -> str:
        """The state of a job."""
        match = re.search(r"JobState=(\w+)", self.call("scontrol", "show", "job", job))
        assert match
        return match[1]

    def restarts(self, job: str) -> int:
        """How often a job went back into the queue."""
        match = re.search(r"Restarts=(\d+)", self.call("scontrol", "show", "job", job))
        assert match
        return int(match[1])

    def wait(self, job: str, log: Path, seconds: float = 1500) -> None:
        """Wait until a job has completed."""
        wait_until(lambda: self.state(job) in ENDED, seconds, f"end of job {job}")
        assert self.state(job) == "COMPLETED", log.read_text() if log.exists() else "no output"


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    folder = Path(tempfile.mkdtemp(prefix="rlhf-slurm-"))
    env = {**os.environ, "RLHF_SLURM": str(folder / "cluster"), "PYTHON": sys.executable}
    try:
        started = subprocess.run(["bash", str(SCRIPT), "up"], env=env, capture_output=True, text=True, timeout=300)
        assert started.returncode == 0, started.stderr
        if started.stdout.startswith("skipped"):
            pytest.skip(started.stdout.strip())
        yield Slurm(folder / "cluster")
    finally:
        subprocess.run(["bash", str(SCRIPT), "down"], env=env, check=True, timeout=300)
        shutil.rmtree(folder)


def test_a_pipeline_runs_its_stage_in_an_allocation(
    slurm: Slurm, servers: Servers, login: dict[str, str], tmp_path: Path
) -> None:
    toy, log = training(tmp_path / "toy", "slurm", 3), tmp_path / "worker.log"
    job = slurm.submit(f"--output={log}", ROOT / "infra/slurm/worker.sbatch", "slurm", **login)

    def workers() -> list[str]:
        """The pool does not exist before its first worker."""
        try:
            answer = ask(login, "work_pools/slurm/workers/filter", {})
        except urllib.error.HTTPError:
            return []
        return [worker["name"] for worker in answer if worker["status"] == "ONLINE"]

    try:
        wait_until(lambda: slurm.state(job) != "PENDING", 300, "start of the worker's job")
        wait_until(workers, 900, "worker")
        assert workers() == [f"slurm-{job}"]
        ended = rlhf("run", cwd=toy, timeout=1500, **login)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert (toy / "policy.txt").read_text() == "done" and (toy / "starts.log").read_text() == "0\n"
        assert "Completed" in log.read_text()
    finally:
        slurm.call("scancel", job)
    wait_until(lambda: slurm.state(job) in ENDED, 300, "end of the worker's job")


def test_a_preempted_stage_goes_back_into_the_queue_and_resumes(slurm: Slurm, tmp_path: Path) -> None:
    stages = """
stages:
  fingerprint: {cmd: mkdir -p .fingerprints && echo code > .fingerprints/ppo.txt, always_changed: true,
                outs: [.fingerprints/ppo.txt: {cache: false}]}
  ppo: {cmd: python train.py 40, deps: [.fingerprints/ppo.txt], outs: [policy.txt]}
"""
    toy, log = make_toy(tmp_path / "toy", stages), tmp_path / "stage.log"
    (toy / "train.py").write_text(PREEMPTIBLE)
    made = subprocess.run([sys.executable, "-m", "dvc", "init", "--no-scm", "-q"], cwd=toy, env=environment())
    assert made.returncode == 0
    script = ROOT / "infra/slurm/stage.sbatch"
    job = slurm.submit("--partition=low", "--nodelist=n1", f"--output={log}", script, "ppo", toy)
    wait_until((toy / "work/ppo/step").exists, 900, "first step")
    slurm.submit(
        *("--partition=high", "--nodelist=n1", "--cpus-per-task=16", "--output=/dev/null", "--wrap=sleep 3"),
    )
    slurm.wait(job, log)
    assert slurm.restarts(job) == 1 and (toy / "policy.txt").read_text() == "done"
    first, second = map(int, (toy / "starts.log").read_text().split())
    assert (first, second > 0) == (0, True)


def test_a_training_stage_runs_on_two_nodes(slurm: Slurm, smoke_copy: Path, tmp_path: Path) -> None:
    params, log = smoke_copy / "params.yaml", tmp_path / "stage.log"
    params.write_text(params.read_text().replace("seed: 1\n", "seed: 2\n", 1))
    script = ROOT / "infra/slurm/stage.sbatch"
    prepared = subprocess.run(
        [sys.executable, "-m", "dvc", "repro", "--single-item", "collect", "validate"],
        cwd=smoke_copy,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert prepared.returncode == 0, prepared.stderr
    job = slurm.submit("--nodes=2", f"--output={log}", script, "sft", smoke_copy, NPROC_PER_NODE="1")
    slurm.wait(job, log)
    status = [sys.executable, "-m", "dvc", "status", "--json", "sft"]
    assert subprocess.run(status, cwd=smoke_copy, env=environment(), capture_output=True).stdout.strip() == b"{}"
