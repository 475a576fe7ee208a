"""A job that ends while DVC is busy with another stage's output waits for it, and is recorded."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from background import wait_until
from dvc.lock import make_lock
from integration.flow_toys import make_toy

from flows.dvc_repo.root import ensure_dvc
from flows.stage import StageSpec, run_stage

pytestmark = pytest.mark.services
GIB = 2**30
ENDING = """
stages:
  ppo:
    cmd: touch started && until [ -e go ]; do sleep 0.05; done && echo p > policy.txt && touch ended
    outs: [policy.txt]
"""
AFTER_ANOTHER = """
stages:
  sft:
    cmd: touch sft.started && until [ -e go ]; do sleep 0.05; done && echo s > sft.txt && echo sft >> runs
    outs: [sft.txt]
  ppo:
    cmd: touch ppo.started && until [ -e go ]; do sleep 0.05; done && echo p > policy.txt && echo ppo >> runs
    deps: [sft.txt]
    outs: [policy.txt]
"""
BOTH = """
stages:
  big: {cmd: python big.py, outs: [big.bin]}
  ppo: {cmd: python ends.py, outs: [policy.txt]}
"""
BIG = """
import hashlib, os, pathlib
block = os.urandom(2**20)
with open("big.bin", "wb") as out:
    for number in range(5 * 1024):
        out.write(hashlib.sha256(str(number).encode()).digest() + block[32:])
pathlib.Path("written").touch()
"""
ENDS = """
import fcntl, pathlib, time
while True:  # until DVC, which holds its lock for as long as it caches, is seen to hold it after big.bin was written
    time.sleep(0.1)
    if not pathlib.Path("written").exists():
        continue
    with open(".dvc/tmp/lock", "r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            break
pathlib.Path("ends.log").open("a").write(f"{time.monotonic()}\\n")
pathlib.Path("policy.txt").write_text("p")
"""


@pytest.mark.slow
def test_a_stage_that_ends_under_dvcs_lock_waits_for_it(tmp_path: Path) -> None:
    toy = make_toy(tmp_path, ENDING)
    ensure_dvc(toy)
    lock = make_lock(str(toy / ".dvc" / "tmp" / "lock"), tmp_dir=str(toy / ".dvc" / "tmp"))
    with ThreadPoolExecutor(1) as threads:
        stage = threads.submit(run_stage, StageSpec(toy, "ppo"))
        wait_until((toy / "started").exists, 240, "start of the stage")
        with lock:
            (toy / "go").touch()
            wait_until((toy / "ended").exists, 240, "end of the stage's command")
            # DVC without the flag gives up after three seconds.
            assert not threading.Event().wait(4.5) and not stage.done()
        outcome = stage.result(240)
    assert outcome.action == "ran", outcome
    assert "ppo:" in (toy / "dvc.lock").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("busy", ["ppo", "sft"], ids=["the same stage", "one that it needs"])
def test_a_stage_waits_for_a_dvc_repro_of_somebody_else(
    tmp_path: Path, busy: str, caplog: pytest.LogCaptureFixture
) -> None:
    toy = make_toy(tmp_path, AFTER_ANOTHER)
    ensure_dvc(toy)
    (toy / "sft.txt").write_text("s")
    with ThreadPoolExecutor(1) as threads:
        repro = subprocess.Popen(
            [sys.executable, "-m", "dvc", "repro", "--single-item", busy], cwd=toy
        )
        try:
            wait_until((toy / f"{busy}.started").exists, 240, "start of the stage")
            stage = threads.submit(run_stage, StageSpec(toy, "ppo"))
            wait_until(lambda: "waits for another DVC command" in caplog.text, 240, "a word on it")
            assert f"process {repro.pid}" in caplog.text and not stage.done()
            (toy / "go").touch()
            assert repro.wait(240) == 0
        finally:
            (toy / "go").touch()
            repro.kill()
        outcome = stage.result(240)
    assert outcome.action == ("cached" if busy == "ppo" else "ran"), outcome
    assert (toy / "runs").read_text().count("ppo") == 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_job_that_ends_while_another_stage_caches_5_gb_is_not_lost(tmp_path: Path) -> None:
    if shutil.disk_usage(tmp_path).free < 20 * GIB:
        pytest.skip("needs 20 GiB of disk")
    toy = make_toy(tmp_path, BOTH)
    (toy / "big.py").write_text(BIG)
    (toy / "ends.py").write_text(ENDS)
    ensure_dvc(toy)
    try:
        with ThreadPoolExecutor(2) as threads:
            big, ppo = (
                threads.submit(run_stage, StageSpec(toy, stage)) for stage in ("big", "ppo")
            )
            outcomes = [big.result(1700), ppo.result(1700)]
        print(outcomes)
        assert [outcome.action for outcome in outcomes] == ["ran", "ran"], outcomes
        assert [run_stage(StageSpec(toy, stage)).action for stage in ("big", "ppo")] == [
            "cached",
            "cached",
        ]
        assert (toy / "ends.log").read_text().count("\n") == 1
    finally:
        shutil.rmtree(toy / ".dvc")
        (toy / "big.bin").unlink(missing_ok=True)
