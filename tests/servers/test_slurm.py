"""The scripts of infra/slurm on a real Slurm cluster of two nodes on this machine (slurm.sh)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path

import psutil
import pytest
from background import wait_until
from integration.flow_toys import ROOT, begin, environment, make_toy, processes_of, rlhf
from servers.conftest import Servers
from servers.test_prefect import login, online, states, training

from rlhf_core.storage.files import sha256_file

__all__ = ["login"]
pytestmark = [pytest.mark.servers, pytest.mark.timeout(3600)]
SCRIPT = Path(__file__).with_name("slurm.sh")
ENDED = {
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "BOOT_FAIL",
    "OUT_OF_MEMORY",
    "DEADLINE",
}
# A training that saves its step when it is stopped and says so, as the stages of the pipeline do.
PREEMPTIBLE = """
import json, pathlib, signal, sys, time
saved = pathlib.Path("work/ppo/step"); saved.parent.mkdir(parents=True, exist_ok=True)
start = int(saved.read_text()) if saved.exists() else 0
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
with open("starts.log", "a") as log: log.write(f"{start}\\n")
step = start
while step < int(sys.argv[1]) and not pathlib.Path("released").exists():
    time.sleep(0.5)
    step += 1
    saved.write_text(str(step))
    if stopped:
        pathlib.Path("stopped").write_text(str(step))
        outcome = pathlib.Path(".rlhf/outcomes/ppo.json"); outcome.parent.mkdir(parents=True, exist_ok=True)
        report = {"stage": "ppo", "exit_code": 75, "message": "", "started": 0.0, "ended": time.time(), "seconds": 1.0}
        outcome.write_text(json.dumps(report))
        sys.exit(75)
pathlib.Path("policy.txt").write_text("done")
"""
PREEMPTIBLE_STAGES = """
stages:
  ppo: {cmd: python train.py 40, deps: [.fingerprints/ppo.txt], outs: [policy.txt]}
"""
STAGE, WORKER = ROOT / "infra/slurm/stage.sbatch", ROOT / "infra/slurm/worker.sbatch"


class Slurm:
    """The cluster whose configuration is in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.env = {"SLURM_CONF": str(folder / "slurm.conf")}

    def call(self, *command: str | Path, **env: str) -> str:
        """Run a command of Slurm in the repository and return what it printed."""
        variables = environment(**self.env, **env)
        ended = subprocess.run(
            [*map(str, command)], cwd=ROOT, env=variables, capture_output=True, text=True
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.strip()

    def submit(self, *words: str | Path, **env: str) -> str:
        """Submit a job and return its number."""
        return self.call("sbatch", "--parsable", *words, **env)

    def show(self, job: str, field: str) -> str:
        """A field of a job, such as ``JobState`` or ``Restarts``."""
        match = re.search(rf"\b{field}=(\S*)", self.call("scontrol", "show", "job", job))
        assert match, f"job {job} has no {field}"
        return match[1]

    def end_of(self, job: str, seconds: float = 1500) -> str:
        """Wait until a job has ended and return its state."""
        wait_until(lambda: self._ended(job), seconds, f"end of job {job}")
        return self.show(job, "JobState")

    def _ended(self, job: str) -> bool:
        self.start_again(job)
        return self.show(job, "JobState") in ENDED

    def start_again(self, job: str) -> None:
        """Start a job that was put back, which Slurm lets wait for two minutes, soon after its
        first start is over.

        Not in the same second: a node refuses what was allowed up to the second in which it ended
        the first start.
        """
        if self.show(job, "Reason") == "BeginTime" and not _has_processes(job):
            begin_time = datetime.fromisoformat(self.show(job, "EligibleTime"))
            if begin_time - datetime.now() > timedelta(seconds=30):
                self.call("scontrol", "update", f"JobId={job}", "StartTime=now+3")


def _has_processes(job: str) -> bool:
    """Whether a process of Slurm's still runs the job's script or a step of it."""
    names = [
        " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])
    ]
    return any(name.startswith(f"slurmstepd: [{job}.") for name in names)


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    folder = Path(tempfile.mkdtemp(prefix="rlhf-slurm-"))
    env = {**os.environ, "RLHF_SLURM": str(folder / "cluster"), "PYTHON": sys.executable}
    try:
        started = subprocess.run(
            ["bash", str(SCRIPT), "up"], env=env, capture_output=True, text=True, timeout=300
        )
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
    toy, log = training(tmp_path / tmp_path.name, "slurm", 3), tmp_path / "worker.log"
    job = slurm.submit(f"--output={log}", WORKER, "slurm", **login)

    try:
        wait_until(
            lambda: slurm.show(job, "JobState") != "PENDING", 300, "start of the worker's job"
        )
        wait_until(lambda: online(login, "slurm"), 900, "worker")
        assert online(login, "slurm") == [f"slurm-{job}"]
        ended = rlhf("run", cwd=toy, timeout=1500, **login)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert (toy / "policy.txt").read_text() == "done" and (
            toy / "starts.log"
        ).read_text() == "0\n"
        # The run ends with the state of its last job, which its worker tells the server before it
        # logs it.
        wait_until(lambda: "Completed" in log.read_text(), 300, "the worker's own word of the end")
    finally:
        slurm.call("scancel", job)
    assert slurm.end_of(job, 300) == "CANCELLED" and slurm.show(job, "Restarts") == "0"


def test_the_stage_of_a_preempted_worker_resumes_in_its_next_allocation(
    slurm: Slurm, login: dict[str, str], tmp_path: Path
) -> None:
    toy, log = training(tmp_path / tmp_path.name, "preempted", 10**6), tmp_path / "worker.log"
    (toy / "train.py").write_text(PREEMPTIBLE)
    job = slurm.submit(
        "--partition=low", "--nodelist=n1", f"--output={log}", WORKER, "preempted", **login
    )
    run = None
    try:
        wait_until(lambda: online(login, "preempted"), 900, "worker")
        run = begin("run", cwd=toy, **login)
        wait_until((toy / "work/ppo/step").exists, 900, "first step")
        preempt(slurm, job)
        wait_until(lambda: slurm.show(job, "Restarts") == "1", 300, "requeue of the worker's job")
        assert not (toy / "policy.txt").exists() and run.poll() is None
        wait_until(
            lambda: slurm.start_again(job) or len(starts(toy)) > 1, 900, "second start of the stage"
        )
        saved = int((toy / "stopped").read_text())
        (toy / "released").touch()
        assert run.wait(900) == 0, (toy / "out.log").read_text()
    finally:
        if run is not None and run.poll() is None:
            run.kill()
        slurm.call("scancel", job)
    assert slurm.end_of(job, 300) == "CANCELLED" and slurm.show(job, "Restarts") == "1"
    assert starts(toy) == [0, saved] and (toy / "policy.txt").read_text() == "done"
    assert states(login, "preempted").count("COMPLETED") == 1, (
        "one job completed, by the next allocation"
    )
    printed = (toy / "out.log").read_text()
    assert (
        "preempted, waiting for a worker of preempted" in printed and "trying again" not in printed
    )
    assert dvc("status", "--json", "ppo", cwd=toy).strip() == "{}" and processes_of(toy) == []


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A workspace whose training takes 20 seconds, and saves its step when it is stopped."""
    toy = make_toy(tmp_path / tmp_path.name, PREEMPTIBLE_STAGES)
    (toy / "train.py").write_text(PREEMPTIBLE)
    made = subprocess.run(
        [sys.executable, "-m", "dvc", "init", "--no-scm", "-q"], cwd=toy, env=environment()
    )
    assert made.returncode == 0
    return toy


def starts(toy: Path) -> list[int]:
    """The step at which each start of the toy's training began."""
    return [int(line) for line in (toy / "starts.log").read_text().split()]


def preempt(slurm: Slurm, job: str) -> None:
    """Submit a job of higher priority that needs the whole node."""
    slurm.submit(
        *(
            "--partition=high",
            "--nodelist=n1",
            "--cpus-per-task=16",
            "--output=/dev/null",
            "--wrap=sleep 3",
        )
    )


INTERRUPTIONS: dict[str, Callable[[Slurm, str], object]] = {
    "preempted": preempt,
    "requeued": lambda slurm, job: slurm.call("scontrol", "requeue", job),
    "signalled, the stage": lambda slurm, job: slurm.call("scancel", "--signal=TERM", job),
    "signalled, the script": lambda slurm, job: slurm.call(
        "scancel", "--signal=TERM", "--batch", job
    ),
}


@pytest.mark.parametrize("interruption", INTERRUPTIONS)
def test_an_interrupted_stage_goes_back_into_the_queue_and_resumes(
    slurm: Slurm, toy: Path, tmp_path: Path, interruption: str
) -> None:
    log = tmp_path / "stage.log"
    job = slurm.submit("--partition=low", "--nodelist=n1", f"--output={log}", STAGE, "ppo", toy)
    wait_until((toy / "work/ppo/step").exists, 900, "first step")
    INTERRUPTIONS[interruption](slurm, job)
    assert slurm.end_of(job) == "COMPLETED", log.read_text()
    assert slurm.show(job, "Restarts") == "1" and (toy / "policy.txt").read_text() == "done"
    first, second = starts(toy)
    assert (first, second > 0) == (0, True)


def test_a_cancelled_stage_ends_and_another_job_resumes_it(
    slurm: Slurm, toy: Path, tmp_path: Path
) -> None:
    log = tmp_path / "stage.log"
    job = slurm.submit(f"--output={log}", STAGE, "ppo", toy)
    wait_until((toy / "work/ppo/step").exists, 900, "first step")
    slurm.call("scancel", job)
    assert slurm.end_of(job, 300) == "CANCELLED" and slurm.show(job, "Restarts") == "0"
    assert not (toy / "policy.txt").exists()
    next_job = slurm.submit(f"--output={log}", STAGE, "ppo", toy)
    assert slurm.end_of(next_job) == "COMPLETED", log.read_text()
    assert (toy / "policy.txt").read_text() == "done" and starts(toy)[0] == 0 < starts(toy)[1]


def test_a_training_on_two_nodes_is_preempted_and_ends_as_if_it_had_not_been(
    slurm: Slurm, smoke_copy: Path, tmp_path: Path
) -> None:
    params = smoke_copy / "params.yaml"
    params.write_text(params.read_text().replace("seed: 1\n", "seed: 2\n", 1))
    dvc("repro", "--single-item", "collect", "validate", cwd=smoke_copy)
    undisturbed = tmp_path / "undisturbed"
    shutil.copytree(smoke_copy, undisturbed, symlinks=True)
    for workspace in (undisturbed, smoke_copy):
        log = tmp_path / f"{workspace.name}.log"
        words = ("--partition=low", "--nodes=2", f"--output={log}", STAGE, "sft", workspace)
        job = slurm.submit(*words, NPROC_PER_NODE="1")
        if workspace == smoke_copy:
            wait_until(
                lambda log=log: log.exists() and "sft: " in log.read_text(), 900, "first step"
            )
            preempt(slurm, job)
        assert slurm.end_of(job) == "COMPLETED", log.read_text()
        assert slurm.show(job, "Restarts") == ("1" if workspace == smoke_copy else "0")
        assert dvc("status", "--json", "sft", cwd=workspace).strip() == "{}"
    weights = [folder / "models/sft/model.safetensors" for folder in (undisturbed, smoke_copy)]
    assert sha256_file(weights[0]) == sha256_file(weights[1])


def dvc(*words: str, cwd: Path) -> str:
    """Run a command of DVC and return what it printed."""
    command = [sys.executable, "-m", "dvc", *words]
    ended = subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
