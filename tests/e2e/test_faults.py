"""kill -9 of every process of a run in turn, and Ctrl-C: reported, resumed, nothing left behind."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "integration"))
from flow_toys import begin, find_process, make_toy, processes_of, rlhf, wait_until

pytestmark = pytest.mark.services
STEPS = 16
PIPELINE = f"""
stages:
  collect: {{cmd: echo x >> collects.log && echo x > raw.txt, outs: [raw.txt]}}
  ppo: {{cmd: python train.py {STEPS}, deps: [raw.txt], outs: [policy.txt]}}
  report: {{cmd: cat policy.txt > report.html, deps: [policy.txt], outs: [report.html]}}
"""
PARAMS = "seed: 1\npools: {ppo: gpu-pool}\nflow: {retry_delay_seconds: 1}\n"
VICTIMS = {
    "stage": ("python train.py",),
    "dvc": ("-m dvc", "repro", "ppo"),
    "engine": ("prefect.engine",),
    "worker": ("prefect worker start",),
}


def in_the_middle(toy: Path) -> subprocess.Popen[bytes]:
    """A run whose PPO has made a few steps and has a child rank."""
    process = begin("run", cwd=toy)
    saved = toy / "work" / "ppo" / "step"
    wait_until(lambda: saved.exists() and int(saved.read_text()) >= 4, 240, "step of PPO")
    return process


def assert_nothing_left(toy: Path) -> None:
    """No process, no active run, and PPO began where it had stopped, after one collect."""
    assert processes_of(toy) == []
    with sqlite3.connect(f"file:{toy}/.rlhf/prefect/prefect.db?mode=ro", uri=True) as database:
        active = "select count(*) from flow_run where state_type in ('RUNNING', 'PENDING', 'CANCELLING')"
        assert database.execute(active).fetchone() == (0,)


def assert_resumed(toy: Path) -> None:
    starts = [int(line) for line in (toy / "starts.log").read_text().split()]
    assert starts[0] == 0 and len(starts) == 2 and starts[1] >= 4
    assert (toy / "collects.log").read_text() == "x\n"


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_killed_process_is_reported_and_ppo_resumes_from_its_checkpoint(tmp_path: Path, victim: str) -> None:
    toy = make_toy(tmp_path, PIPELINE, PARAMS)
    run = in_the_middle(toy)
    find_process(toy, *VICTIMS[victim]).kill()
    assert run.wait(240) == 0, (toy / "out.log").read_text()
    text = (toy / "out.log").read_text()
    assert "trying again" in text
    assert_nothing_left(toy)
    assert_resumed(toy)


def test_a_killed_top_level_command_takes_everything_along_and_the_next_run_goes_on(tmp_path: Path) -> None:
    toy = make_toy(tmp_path, PIPELINE, PARAMS)
    run = in_the_middle(toy)
    run.kill()
    run.wait()
    wait_until(lambda: processes_of(toy) == [], 15, "end of all processes")
    answer = rlhf("run", cwd=toy)
    assert answer.returncode == 0 and "of an earlier run as ended" in answer.stdout, answer.stdout + answer.stderr
    assert_nothing_left(toy)
    assert_resumed(toy)


def test_ctrl_c_ends_everything_within_15_seconds_as_cancelled(tmp_path: Path) -> None:
    toy = make_toy(tmp_path, PIPELINE, PARAMS)
    run = in_the_middle(toy)
    began = time.monotonic()
    run.send_signal(signal.SIGINT)
    assert run.wait(60) == 130
    assert time.monotonic() - began < 15
    assert_nothing_left(toy)
    with sqlite3.connect(f"file:{toy}/.rlhf/prefect/prefect.db?mode=ro", uri=True) as database:
        assert set(database.execute("select state_type from flow_run").fetchall()) == {("CANCELLED",)}
