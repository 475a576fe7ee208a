"""A pipeline whose training saves a checkpoint every few steps, and what must hold after any
fault.
"""

from __future__ import annotations

import hashlib
import sqlite3
import subprocess
from pathlib import Path

from background import wait_until
from integration.flow_toys import begin, make_toy, processes_of

STEPS, SAVE_EVERY = 36, 3
PIPELINE = """
stages:
  collect: {cmd: echo x >> collects.log && echo x > raw.txt, outs: [raw.txt]}
  ppo: {cmd: python train.py, deps: [raw.txt], outs: [policy.txt]}
  report: {cmd: cat policy.txt > report.html, deps: [policy.txt], outs: [report.html]}
"""
PARAMS = "seed: 1\npools: {ppo: gpu-pool}\nflow: {retry_delay_seconds: 1}\n"
TRAIN = f"""
import hashlib, json, pathlib, subprocess, sys, time
work = pathlib.Path("work/ppo"); work.mkdir(parents=True, exist_ok=True)
rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
saved, part = work / "checkpoint.json", work / "part"
step, weights = json.loads(saved.read_text()) if saved.exists() else (0, "")
while step < {STEPS}:
    time.sleep(float(pathlib.Path("pace.txt").read_text()))
    weights = hashlib.sha256((weights + str(step)).encode()).hexdigest()
    step += 1
    with open("steps.log", "a") as log: log.write(f"{{step}}\\n")
    if step % {SAVE_EVERY} == 0:
        part.write_text(json.dumps([step, weights])); part.replace(saved)
    print(f"ppo: {{step}}/{STEPS}", flush=True)
rank.kill(); rank.wait()
pathlib.Path("policy.txt").write_text(weights)
"""
ACTIVE = "state_type in ('RUNNING', 'PENDING', 'CANCELLING')"


def training_toy(
    folder: Path, prefect_database: Path | None = None, params: str = PARAMS, pace: float = 0.125
) -> Path:
    """Create a workspace with :data:`PIPELINE`; a step of PPO takes ``pace`` seconds."""
    toy = make_toy(folder, PIPELINE, params, prefect_database)
    (toy / "train.py").write_text(TRAIN)
    set_pace(toy, pace)
    return toy


def set_pace(toy: Path, seconds: float) -> None:
    """From the next step on, let a step of PPO take ``seconds``."""
    (toy / "pace.part").write_text(str(seconds))
    (toy / "pace.part").replace(toy / "pace.txt")


def steps_done(toy: Path) -> list[int]:
    """Return every step of PPO that was made, in order, repeated ones included."""
    log = toy / "steps.log"
    return [int(line) for line in log.read_text().split()] if log.exists() else []


def in_the_middle(toy: Path, *arguments: str, **env: str) -> subprocess.Popen[bytes]:
    """Start `rlhf run` and wait until PPO is between its first and its second checkpoint."""
    process = begin("run", *arguments, cwd=toy, **env)
    wait_until(lambda: len(steps_done(toy)) > SAVE_EVERY, 900, "step of PPO after a checkpoint")
    return process


def undisturbed() -> str:
    """Return the policy of an undisturbed training."""
    weights = ""
    for step in range(STEPS):
        weights = hashlib.sha256((weights + str(step)).encode()).hexdigest()
    return weights


def assert_nothing_lost(toy: Path, faults: int = 1) -> None:
    """Check that the results are those of an undisturbed run, and that each fault cost at most
    ``SAVE_EVERY`` steps.
    """
    assert (toy / "report.html").read_text() == undisturbed()
    assert (toy / "collects.log").read_text() == "x\n"
    done = steps_done(toy)
    assert set(done) == set(range(1, STEPS + 1))
    assert len(done) - STEPS <= SAVE_EVERY * faults, done
    assert done.count(1) == 1, "PPO started over"


def assert_nothing_held(toy: Path) -> None:
    """Check that no process of the workspace is alive, and that no flow run or limit of its server
    holds a slot.
    """
    assert processes_of(toy) == []
    assert rows(toy, f"select name from flow_run where {ACTIVE}") == []
    assert rows(toy, "select name from concurrency_limit_v2 where active_slots > 0") == []


def rows(toy: Path, query: str) -> list[tuple[object, ...]]:
    """Query the database of the workspace's own Prefect server."""
    with sqlite3.connect(f"file:{toy}/.rlhf/prefect/prefect.db?mode=ro", uri=True) as database:
        return database.execute(query).fetchall()
