"""A stage that is placed on several nodes is one Slurm job, on a real cluster of two (slurm.sh)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from background import wait_until
from integration.flow_toys import ROOT, environment
from servers.test_slurm import Slurm, slurm

from rlhf_core.config.operations import Placement
from rlhf_core.errors import Preempted, RlhfError
from rlhf_core.runtime.preemption import PreemptionSignal
from rlhf_core.stages.runtime import slurm as slurm_stage

__all__ = ["slurm"]
pytestmark = [pytest.mark.servers, pytest.mark.timeout(3600)]

# What stands in for a node's part of a training: it saves its step when it is stopped, says how it
# ended, and fails on node 1 where a file asks for it.
NODE = """
import json, os, pathlib, signal, sys, time
workspace, node = pathlib.Path(sys.argv[-1]), os.environ["SLURM_NODEID"]
saved, stopped = workspace / f"step-{node}", []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
def end(code, message):
    report = {"stage": "sft", "exit_code": code, "message": message, "started": 0.0, "ended": time.time()}
    (workspace / f".rlhf/outcomes/sft.node-{node}.json").write_text(json.dumps(report))
    sys.exit(code)
(workspace / ".rlhf/outcomes").mkdir(parents=True, exist_ok=True)
step = int(saved.read_text()) if saved.exists() else 0
print(f"node {node} of {os.environ['SLURM_NNODES']} starts at {step}, meets at {os.environ['RLHF_RENDEZVOUS']}", flush=True)
while step < 20 or (workspace / "endless").exists():
    time.sleep(0.2); step += 1; saved.write_text(str(step))
    if stopped: end(75, f"sft made step {step}")
    if (workspace / "faulty").exists() and node == "1": end(2, "sft: node 1 has no data")
end(0, "done")
"""


@pytest.fixture
def toy(tmp_path: Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A workspace whose stage is :data:`NODE`."""
    (tmp_path / "node.py").write_text(NODE)
    monkeypatch.setattr(slurm_stage, "COMMAND", (sys.executable, str(tmp_path / "node.py")))
    monkeypatch.setattr(slurm_stage, "POLL_SECONDS", 0.5)
    for name, value in slurm.env.items():
        monkeypatch.setenv(name, value)
    return tmp_path


PLACE = Placement(pool="p", nodes=2, gpus=1, cpus="2", memory="1Gi", time_limit_seconds=900)


def run(toy: Path, place: Placement = PLACE, preemption: PreemptionSignal | None = None) -> None:
    slurm_stage.run_as_job("sft", toy, place, 60.0, preemption or PreemptionSignal())


def number(toy: Path) -> str:
    """The number of the job that was submitted."""
    file = toy / ".rlhf/slurm/sft.job"
    wait_until(lambda: file.exists() and file.read_text(), 60, "job")
    return file.read_text()


def test_two_nodes_run_one_stage_resume_after_a_requeue_and_its_log_is_shown(
    toy: Path, slurm: Slurm, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def put_back() -> None:
        wait_until((toy / "step-1").exists, 120, "first step")
        job = number(toy)
        slurm.call("scancel", "--signal=TERM", job)
        wait_until(lambda: slurm.show(job, "Restarts") == "1", 120, "requeue")
        for _ in range(60):
            slurm.start_again(job)
            time.sleep(1)

    threading.Thread(target=put_back, daemon=True).start()
    run(toy)
    shown = capfd.readouterr().err
    starts = [line for line in shown.splitlines() if " starts at " in line]
    assert len(starts) == 4 and {line.split(" starts")[0] for line in starts} == {
        "node 0 of 2",
        "node 1 of 2",
    }
    assert sum(" starts at 0," in line for line in starts) == 2, "each resumes where it was"
    assert len({line.rpartition(" ")[2] for line in starts}) == 1 and "meets at n1:" in starts[0]
    said = [record.getMessage() for record in caplog.records]
    assert any("runs on 2 node(s)" in line for line in said)
    assert any("put back 1 time(s)" in line for line in said)
    assert not (toy / ".rlhf/slurm/sft.job").exists()
    assert not list((toy / ".rlhf/outcomes").glob("sft.node-*"))


def test_the_node_that_fails_first_says_why_and_no_job_is_left(toy: Path, slurm: Slurm) -> None:
    (toy / "faulty").touch()
    with pytest.raises(RlhfError, match=r"^sft: node 1 has no data$") as raised:
        run(toy)
    assert raised.value.exit_code == 2
    wait_until(lambda: slurm.call("squeue", "--noheader") == "", 120, "empty queue")


def test_what_slurm_refuses_is_one_line(toy: Path) -> None:
    place = PLACE.model_copy(update={"sbatch": ("--partition=nosuch",)})
    with pytest.raises(RlhfError, match=r"Slurm does not take its job of 2 node\(s\): .*pools.sft"):
        run(toy, place)


def test_sigterm_saves_and_ends_the_job_and_the_job_of_a_killed_run_is_ended_by_the_next(
    toy: Path, slurm: Slurm
) -> None:
    (toy / "endless").touch()
    code = (
        "import sys; from pathlib import Path; from rlhf_core.stages.runtime import slurm\n"
        "from rlhf_core.config.operations import Placement\n"
        "from rlhf_core.runtime.preemption import PreemptionSignal\n"
        f"slurm.COMMAND = {slurm_stage.COMMAND!r}\n"
        f"slurm.run_as_job('sft', Path({str(toy)!r}), Placement(pool='p', nodes=2), 60.0, PreemptionSignal())"
    )
    killed = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment(**slurm.env))
    first = number(toy)
    wait_until((toy / "step-1").exists, 120, "first step")
    killed.kill()
    killed.wait()
    assert slurm.show(first, "JobState") == "RUNNING"

    def stop() -> None:
        wait_until(lambda: number(toy) != first, 120, "second job")
        wait_until(lambda: slurm.show(number(toy), "JobState") == "RUNNING", 120, "its start")
        time.sleep(2)
        os.kill(os.getpid(), signal.SIGTERM)

    preemption = PreemptionSignal()
    threading.Thread(target=stop, daemon=True).start()
    with pytest.raises(Preempted, match="sft made step"), preemption.handled("sft"):
        run(toy, preemption=preemption)
    saved = int((toy / "step-0").read_text())
    assert saved > 0
    wait_until(lambda: slurm.call("squeue", "--noheader") == "", 120, "empty queue")
    for job in (first, str(int(first) + 1)):
        assert slurm.show(job, "Restarts") == "0", "nobody wants it back in the queue"


@pytest.mark.slow
def test_a_real_training_on_two_nodes_is_recorded_by_dvc(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from unit.stages.test_kept_result import DVC_YAML
    from unit.training import tiny

    tiny.make_workspace(tmp_path)
    (tmp_path / "params.yaml").write_text(
        tiny.PARAMS + "compute: {launch: {sft: {processes: 1, nodes: 2}}}\n"
        "pools: {sft: {pool: p, nodes: 2, cpus: '2'}}\n"
    )
    (tmp_path / "dvc.yaml").write_text(DVC_YAML)
    (tmp_path / ".dvc").mkdir()
    (tmp_path / ".dvc/config").write_text("[core]\n    no_scm = True\n    analytics = false\n")
    env = environment(RLHF_TRACKING="off", OMP_NUM_THREADS="1", **slurm.env)
    for command in (["repro", "--single-item", "sft"], ["status", "--json", "sft"]):
        ended = subprocess.run(
            [sys.executable, "-m", "dvc", *command],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.strip() == "{}"
    assert json.loads((tmp_path / ".rlhf/outcomes/sft.json").read_text())["exit_code"] == 0
    assert list((tmp_path / "models/sft").glob("*.safetensors"))
