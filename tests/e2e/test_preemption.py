"""A preempted stage on a pool goes back to the queue, and the run ends as if it had not been
preempted.
"""

from __future__ import annotations

import signal
import sqlite3
from pathlib import Path

import pytest
from background import wait_until
from integration.flow_toys import begin, find_process, make_toy, processes_of

pytestmark = [pytest.mark.services, pytest.mark.slow]
STEPS = 24
PIPELINE = f"""
stages:
  ppo: {{cmd: python train.py {STEPS}, outs: [policy.txt]}}
  report: {{cmd: cat policy.txt > report.html, deps: [policy.txt], outs: [report.html]}}
"""
# No retry would be left, were this a failure.
PARAMS = "seed: 1\npools: {ppo: gpu-pool}\nflow: {retries: 0, stop_grace_seconds: 30}\n"
# Saves its state only when it receives SIGTERM: a start beyond step 0 follows a preemption.
TRAIN = """
import json, pathlib, signal, sys, time
stops = []
signal.signal(signal.SIGTERM, lambda *_: stops.append(1))
work = pathlib.Path("work/ppo"); work.mkdir(parents=True, exist_ok=True)
saved = work / "step"
start = int(saved.read_text()) if saved.exists() else 0
with open("starts.log", "a") as log: log.write(f"{start}\\n")
for step in range(start, int(sys.argv[1])):
    time.sleep(0.3)
    (work / "now").write_text(str(step + 1))
    if stops:
        saved.write_text(str(step + 1))
        times = {"started": 0.0, "ended": time.time(), "seconds": 1.0}
        report = {"stage": "ppo", "exit_code": 75, "message": f"ppo made step {step + 1}", **times}
        pathlib.Path(".rlhf/outcomes").mkdir(parents=True, exist_ok=True)
        pathlib.Path(".rlhf/outcomes/ppo.json").write_text(json.dumps(report))
        sys.exit(75)
pathlib.Path("policy.txt").write_text("done")
"""


def starts(toy: Path) -> list[int]:
    path = toy / "starts.log"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def trained_further(toy: Path, attempt: int) -> bool:
    """Whether start number ``attempt`` has made two steps of its own."""
    now = toy / "work" / "ppo" / "now"
    return (
        len(starts(toy)) == attempt
        and now.exists()
        and int(now.read_text() or 0) >= starts(toy)[-1] + 2
    )


def test_a_stopped_stage_and_then_a_drained_worker_lose_no_work(
    tmp_path: Path, prefect_database: Path
) -> None:
    toy = make_toy(tmp_path, PIPELINE, PARAMS, prefect_database)
    (toy / "train.py").write_text(TRAIN)
    run = begin("run", cwd=toy)
    wait_until(
        lambda: trained_further(toy, 1) or run.poll() is not None, 300, "step of the first start"
    )
    find_process(toy, "python train.py").send_signal(signal.SIGTERM)
    wait_until(
        lambda: trained_further(toy, 2) or run.poll() is not None, 300, "step of the second start"
    )
    find_process(toy, "prefect worker start").send_signal(signal.SIGTERM)
    assert run.wait(300) == 0, (toy / "out.log").read_text()

    text = (toy / "out.log").read_text()
    assert text.count("ppo          preempted, ") == 2 and "worker of gpu-pool" in text
    assert "trying again" not in text
    steps = starts(toy)
    assert len(steps) == 3 and steps[0] == 0 < steps[1] < steps[2] < STEPS
    assert (toy / "report.html").read_text() == "done"
    assert processes_of(toy) == []
    with sqlite3.connect(f"file:{toy}/.rlhf/prefect/prefect.db?mode=ro", uri=True) as database:
        jobs = "select state_type from flow_run where name like '% · ppo' order by created"
        assert database.execute(jobs).fetchall() == [("CRASHED",), ("CRASHED",), ("COMPLETED",)]
