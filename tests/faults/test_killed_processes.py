"""kill -9 of every process of a run in turn, and Ctrl-C: reported, resumed, no process left
behind.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from background import wait_until
from faults.toys import (
    PARAMS,
    SAVE_EVERY,
    STEPS,
    assert_nothing_held,
    assert_nothing_lost,
    in_the_middle,
    rows,
    set_pace,
    steps_done,
    training_toy,
)
from integration.flow_toys import find_process, processes_of, rlhf

pytestmark = [pytest.mark.services, pytest.mark.timeout(1500)]
STAGE, JOB, WORKER = ("python train.py",), ("prefect.engine",), ("prefect worker start",)
# 137 where the shell that DVC starts does not become the training but waits for it.
STAGE_KILLED = r"failed to run: python train\.py, exited with (-9|137)"
WORKER_ENDED = (
    r"the worker of gpu-pool exited \(status 137\), and its job with it; starting another worker"
)
RETRIED = "trying again in 1 s"
HELD = 10.0  # seconds of a step, so that no checkpoint is written between its look-up and the kill
# By victim: what is killed, what the run says of it, and what it says next. When a worker dies, its
# job receives SIGTERM and the stage saves its state: that uses up no retry.
VICTIMS = {
    "stage": ([STAGE], STAGE_KILLED, RETRIED),
    "dvc": ([("-m dvc", "repro", "ppo")], r"dvc was killed \(SIGKILL\)", RETRIED),
    "job": ([JOB], "its job on gpu-pool ended as Crashed", RETRIED),
    "worker": ([WORKER], WORKER_ENDED, f"{RETRIED}|preempted, waiting for a worker of gpu-pool"),
    "job and worker": ([WORKER, JOB], WORKER_ENDED, RETRIED),
}


@pytest.mark.slow
def test_each_killed_process_is_reported_and_ppo_resumes_from_its_checkpoint(
    tmp_path: Path, prefect_database: Path
) -> None:
    """One run loses each victim in turn, and at last its server, which costs no step."""
    toy = training_toy(
        tmp_path, prefect_database, PARAMS.replace("flow: {", f"flow: {{retries: {len(VICTIMS)}, ")
    )
    run = in_the_middle(toy)
    for victim, (targets, message, reaction) in VICTIMS.items():
        set_pace(toy, HELD)
        training, reported = find_process(toy, *STAGE), len(report(toy))
        for process in [find_process(toy, *command) for command in targets]:
            process.kill()
        wait_until(
            lambda training=training: training not in processes_of(toy),
            120,
            f"end of the training: {victim}",
        )
        set_pace(toy, 0.25)
        for expected in (message, reaction):
            wait_for_report(toy, expected, reported)
        steps = len(steps_done(toy))
        wait_until(
            lambda steps=steps: len(steps_done(toy)) > steps + SAVE_EVERY,
            300,
            f"training after: {victim}",
        )
    before = steps_done(toy)
    find_process(toy, "prefect server start").kill()
    wait_for_report(toy, r"the Prefect server exited \(status 137\); restarting it")
    assert run.wait(600) == 0, report(toy)
    assert steps_done(toy)[len(before) :] == [*range(before[-1] + 1, STEPS + 1)], (
        "a step was repeated"
    )
    assert_nothing_lost(toy, faults=len(VICTIMS))
    assert_nothing_held(toy)


def report(toy: Path) -> str:
    """Return what the run has printed so far."""
    return (toy / "out.log").read_text()


def wait_for_report(toy: Path, expected: str, start: int = 0) -> None:
    """Wait until the run has printed a match of ``expected`` after the first ``start``
    characters.
    """
    wait_until(
        lambda: re.search(expected, report(toy)[start:]),
        300,
        f"{expected!r} in the output of the run",
    )


@pytest.mark.dear("the whole run is killed, with its real server, worker and job")
def test_a_killed_top_level_command_ends_everything_and_the_next_run_resumes(
    tmp_path: Path, prefect_database: Path
) -> None:
    toy = training_toy(tmp_path, prefect_database)
    run = in_the_middle(toy)
    run.kill()
    run.wait()
    wait_until(lambda: processes_of(toy) == [], 60, "end of all processes")
    answer = rlhf("run", cwd=toy)
    assert answer.returncode == 0 and "of an earlier run as ended" in answer.stdout, (
        answer.stdout + answer.stderr
    )
    assert_nothing_lost(toy)
    assert_nothing_held(toy)


@pytest.mark.slow
def test_ctrl_c_ends_everything_as_cancelled(tmp_path: Path, prefect_database: Path) -> None:
    toy = training_toy(tmp_path, prefect_database)
    run = in_the_middle(toy)
    run.send_signal(signal.SIGINT)
    assert run.wait(120) == 130
    assert_nothing_held(toy)
    assert set(rows(toy, "select state_type from flow_run")) == {("CANCELLED",)}
