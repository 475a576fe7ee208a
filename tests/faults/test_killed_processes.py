"""kill -9 of every process of a run in turn, and Ctrl-C: reported, resumed, no process left behind."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from toys import (
    assert_nothing_held,
    assert_nothing_lost,
    find_process,
    in_the_middle,
    processes_of,
    rlhf,
    rows,
    training_toy,
    wait_until,
)

pytestmark = pytest.mark.services
STAGE, JOB, WORKER = ("python train.py",), ("prefect.engine",), ("prefect worker start",)
# 137 where the shell that DVC starts does not become the training but waits for it.
STAGE_KILLED = r"failed to run: python train\.py, exited with (-9|137)"
WORKER_ENDED = r"the worker of gpu-pool exited \(status 137\), and its job with it; starting another worker"
VICTIMS = {
    "stage": ([STAGE], STAGE_KILLED),
    "dvc": ([("-m dvc", "repro", "ppo")], r"dvc was killed \(SIGKILL\)"),
    "job": ([JOB], "its job on gpu-pool ended as Crashed"),
    "worker": ([WORKER], WORKER_ENDED),
    "job and worker": ([WORKER, JOB], WORKER_ENDED),
}


@pytest.mark.parametrize("victim", [pytest.param(v, marks=pytest.mark.slow) if v == "dvc" else v for v in VICTIMS])
def test_a_killed_process_is_reported_and_ppo_resumes_from_its_checkpoint(
    tmp_path: Path, prefect_database: Path, victim: str
) -> None:
    toy = training_toy(tmp_path, prefect_database)
    run = in_the_middle(toy)
    targets, message = VICTIMS[victim]
    processes = [find_process(toy, *command) for command in targets]
    for process in processes:
        process.kill()
    assert run.wait(600) == 0, (toy / "out.log").read_text()
    text = (toy / "out.log").read_text()
    # When a worker dies, its job receives SIGTERM and the stage saves its state: that uses up no retry.
    again = ["trying again in 1 s", *(["preempted, waiting for a worker of gpu-pool"] if victim == "worker" else [])]
    assert re.search(message, text) and any(message in text for message in again), text
    assert_nothing_lost(toy)
    assert_nothing_held(toy)


def test_a_killed_top_level_command_ends_everything_and_the_next_run_resumes(
    tmp_path: Path, prefect_database: Path
) -> None:
    toy = training_toy(tmp_path, prefect_database)
    run = in_the_middle(toy)
    run.kill()
    run.wait()
    wait_until(lambda: processes_of(toy) == [], 60, "end of all processes")
    answer = rlhf("run", cwd=toy)
    assert answer.returncode == 0 and "of an earlier run as ended" in answer.stdout, answer.stdout + answer.stderr
    assert_nothing_lost(toy)
    assert_nothing_held(toy)


def test_ctrl_c_ends_everything_as_cancelled(tmp_path: Path, prefect_database: Path) -> None:
    toy = training_toy(tmp_path, prefect_database)
    run = in_the_middle(toy)
    run.send_signal(signal.SIGINT)
    assert run.wait(120) == 130
    assert_nothing_held(toy)
    assert set(rows(toy, "select state_type from flow_run")) == {("CANCELLED",)}
