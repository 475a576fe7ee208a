"""run-stage.sh and the Slurm scripts on a toy workspace, with real DVC; Slurm's programs and
torchrun are stand-ins.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from background import wait_until
from integration.flow_toys import ROOT, environment, make_toy

pytestmark = [pytest.mark.services, pytest.mark.slow]
STEPS = """
stages:
  ppo: {cmd: python train.py STEPS, deps: [.fingerprints/ppo.txt, raw.txt], outs: [policy.txt]}
"""
# What Slurm's programs do for the scripts: run the step on every node, signal it, take the job back
# into the queue.
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
for node in $(seq 0 $((SLURM_NNODES - 1))); do SLURM_NODEID=$node "$@" & echo $! >> "$TEST_DIR/tasks"; done
status=0; for task in $(cat "$TEST_DIR/tasks"); do wait "$task" || status=$?; done; exit $status
"""
SCANCEL = """#!/usr/bin/env bash
echo "scancel $*" >> "$TEST_DIR/calls"
while read -r task; do kill -TERM "$task"; done < "$TEST_DIR/tasks"
"""
SCONTROL = """#!/usr/bin/env bash
if [[ $2 == hostnames ]]; then printf 'node-a\\nnode-b\\n'
elif [[ $2 == job ]]; then echo "JobId=$3 JobState=RUNNING Reason=None"
else echo "scontrol $*" >> "$TEST_DIR/calls"; fi
"""
TORCHRUN = """#!/usr/bin/env bash
echo "$*" >> "$TEST_DIR/torchrun"
sleep 0.3
if [[ $* == *'--node-rank 0'* ]]; then echo trained > policy.txt; fi
"""
RLHF = """#!/usr/bin/env bash
mkdir -p .fingerprints && echo code > .fingerprints/ppo.txt
"""


def make_programs(folder: Path, **programs: str) -> Path:
    folder.mkdir()
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def make_workspace(folder: Path, steps: int) -> Path:
    workspace = make_toy(folder / "workspace", STEPS.replace("STEPS", str(steps)))
    (workspace / "raw.txt").write_text("x")
    (workspace / ".dvc").mkdir()  # what `dvc init` would take a second for
    (workspace / ".dvc" / "config").write_text("[core]\n    no_scm = True\n    analytics = false\n")
    return workspace


def start(script: str, *arguments: object, folder: Path, **env: str) -> subprocess.Popen[bytes]:
    """Run a script with the stand-ins of ``folder/bin`` first on the path; output in
    ``folder/out.log``.
    """
    variables = environment(TEST_DIR=str(folder), **env)
    variables["PATH"] = os.pathsep.join([str(folder / "bin"), variables["PATH"]])
    with (folder / "out.log").open("wb") as log:
        command = ["bash", ROOT / "infra" / script, *map(str, arguments)]
        return subprocess.Popen(command, env=variables, stdout=log, stderr=subprocess.STDOUT)


def output(folder: Path) -> str:
    return (folder / "out.log").read_text()


def up_to_date(workspace: Path) -> bool:
    command = [sys.executable, "-m", "dvc", "status", "--json", "ppo"]
    return (
        subprocess.run(
            command, cwd=workspace, env=environment(), capture_output=True
        ).stdout.strip()
        == b"{}"
    )


def test_a_stopped_stage_exits_with_75_and_resumes_when_it_is_run_again(tmp_path: Path) -> None:
    make_programs(tmp_path / "bin")
    workspace = make_workspace(tmp_path, steps=30)
    process = start(
        "launch/run-stage.sh", "ppo", folder=tmp_path, RLHF_WORKSPACE=str(workspace), STOP_GRACE="3"
    )
    saved = workspace / "work" / "ppo" / "step"
    wait_until(lambda: saved.exists() or process.poll() is not None, 200, "first step")
    process.send_signal(signal.SIGTERM)
    assert process.wait(200) == 75, output(tmp_path)
    assert not (workspace / "policy.txt").exists()
    done = int(saved.read_text())
    (workspace / "dvc.yaml").write_text(STEPS.replace("STEPS", str(done + 1)))
    (workspace / ".dvc" / "tmp" / "rwlock").write_text(
        ""
    )  # as DVC leaves it if it is killed while it writes
    process = start("launch/run-stage.sh", "ppo", folder=tmp_path, RLHF_WORKSPACE=str(workspace))
    assert process.wait(200) == 0, output(tmp_path)
    assert (workspace / "starts.log").read_text().split() == ["0", str(done)]
    assert up_to_date(workspace)


def test_a_workspace_in_use_is_refused(tmp_path: Path) -> None:
    make_programs(tmp_path / "bin")
    workspace = make_workspace(tmp_path, steps=1)
    (workspace / ".rlhf").mkdir(exist_ok=True)
    with (workspace / ".rlhf" / "lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        process = start(
            "launch/run-stage.sh", "ppo", folder=tmp_path, RLHF_WORKSPACE=str(workspace)
        )
        assert process.wait(200) == 2
    assert "is in use by a pipeline or another job" in output(tmp_path)


def slurm(folder: Path, nodes: int, gpus: int) -> dict[str, str]:
    job = {"SLURM_JOB_ID": "41", "SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_SUBMIT_DIR": str(ROOT)}
    return {**job, "SLURM_NNODES": str(nodes), "SLURM_GPUS_ON_NODE": str(gpus), "STOP_GRACE": "3"}


def test_ranks_of_two_nodes_meet_at_the_first_and_the_result_is_recorded(tmp_path: Path) -> None:
    make_programs(
        tmp_path / "bin",
        srun=SRUN,
        scancel=SCANCEL,
        scontrol=SCONTROL,
        torchrun=TORCHRUN,
        rlhf=RLHF,
    )
    workspace = make_workspace(tmp_path, steps=1)
    process = start(
        "slurm/stage.sbatch", "ppo", workspace, folder=tmp_path, **slurm(tmp_path, 2, 8)
    )
    assert process.wait(200) == 0, output(tmp_path)
    common = (
        "--nproc-per-node 8 --max-restarts 0 --signals-to-handle SIGINT,SIGHUP,SIGQUIT --master-addr node-a "
        "--master-port 20041 --no-python rlhf stage ppo"
    )
    expected = [f"--nnodes 2 --node-rank {node} {common}" for node in (0, 1)]
    assert sorted((tmp_path / "torchrun").read_text().splitlines()) == expected
    assert not (tmp_path / "calls").exists()
    assert up_to_date(workspace) and "policy.txt" in (workspace / "dvc.lock").read_text()
    (tmp_path / "tasks").unlink()
    again = start("slurm/stage.sbatch", "ppo", workspace, folder=tmp_path, **slurm(tmp_path, 2, 8))
    assert again.wait(200) == 0 and output(tmp_path).count("ppo is up to date") == 2
    assert len((tmp_path / "torchrun").read_text().splitlines()) == 2


def test_a_job_whose_time_is_up_stops_its_stage_and_goes_back_into_the_queue(
    tmp_path: Path,
) -> None:
    make_programs(tmp_path / "bin", srun=SRUN, scancel=SCANCEL, scontrol=SCONTROL)
    workspace = make_workspace(tmp_path, steps=200)
    process = start(
        "slurm/stage.sbatch", "ppo", workspace, folder=tmp_path, **slurm(tmp_path, 1, 1)
    )
    wait_until(
        lambda: (workspace / "work" / "ppo" / "step").exists() or process.poll() is not None,
        200,
        "first step",
    )
    process.send_signal(signal.SIGTERM)
    assert process.wait(200) == 0, output(tmp_path)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == ["scancel --signal=TERM 41", "scontrol requeue 41"]
    assert (
        "goes back into the queue" in output(tmp_path) and not (workspace / "policy.txt").exists()
    )


def test_a_preempted_stage_is_requeued_if_only_its_steps_were_signalled(tmp_path: Path) -> None:
    """Slurm's own preemption sends SIGTERM to the processes of the steps and not to the batch
    script.
    """
    make_programs(tmp_path / "bin", srun=SRUN, scancel=SCANCEL, scontrol=SCONTROL)
    workspace = make_workspace(tmp_path, steps=1)
    verdict = '{\n  "exit_code": 75,\n  "message": "ppo made step 4 of 9"\n}\n'
    (workspace / "train.py").write_text(
        f"import pathlib; pathlib.Path('.rlhf/outcomes').mkdir(parents=True, exist_ok=True); "
        f"pathlib.Path('.rlhf/outcomes/ppo.json').write_text({verdict!r}); raise SystemExit(75)"
    )
    process = start(
        "slurm/stage.sbatch", "ppo", workspace, folder=tmp_path, **slurm(tmp_path, 1, 1)
    )
    assert process.wait(200) == 0, output(tmp_path)
    assert (tmp_path / "calls").read_text() == "scontrol requeue 41\n"
    (tmp_path / "tasks").unlink()
    (tmp_path / "calls").unlink()
    (workspace / "train.py").write_text("raise SystemExit(4)")  # an earlier report does not count
    process = start(
        "slurm/stage.sbatch", "ppo", workspace, folder=tmp_path, **slurm(tmp_path, 1, 1)
    )
    assert process.wait(200) not in (0, 75) and not (tmp_path / "calls").exists()


def test_a_worker_whose_time_is_up_is_stopped_and_its_allocation_goes_back(tmp_path: Path) -> None:
    prefect = '#!/usr/bin/env bash\ntrap "exit 0" INT\necho "$*" > "$TEST_DIR/worker"\nwhile true; do sleep 0.1; done\n'
    make_programs(tmp_path / "bin", prefect=prefect, scontrol=SCONTROL)
    url = "http://127.0.0.1:4200/api"
    process = start(
        "slurm/worker.sbatch", folder=tmp_path, PREFECT_API_URL=url, **slurm(tmp_path, 1, 1)
    )
    wait_until(lambda: (tmp_path / "worker").exists() or process.poll() is not None, 100, "worker")
    process.send_signal(signal.SIGTERM)
    process.wait(200)
    assert (tmp_path / "calls").read_text() == "scontrol requeue 41\n", output(tmp_path)
    assert "--pool gpu-pool --type process" in (tmp_path / "worker").read_text()
