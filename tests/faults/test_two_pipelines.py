"""Two pipelines at once in one workspace: one at a time, and a stage that still runs is never run
beside itself.
"""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from background import wait_until
from faults.toys import assert_nothing_held, assert_nothing_lost, in_the_middle, training_toy
from integration.flow_toys import begin, make_toy, rlhf

from flows.dvc_repo.root import ensure_dvc
from flows.stage import StageSpec, run_stage

pytestmark = pytest.mark.services
SLOW_STAGE = "stages:\n  ppo: {cmd: 'echo x >> started && sleep 2 && echo p > policy.txt', outs: [policy.txt]}\n"


@pytest.mark.slow
def test_the_second_run_is_refused_in_one_line_and_the_first_continues(
    tmp_path: Path, prefect_database: Path
) -> None:
    toy = training_toy(tmp_path, prefect_database, params="seed: 1\n", pace=0.05)
    first = begin("run", cwd=toy)
    wait_until((toy / ".rlhf" / "logs" / "server.log").exists, 240, "start of the first run")
    second = rlhf("run", cwd=toy)
    assert second.returncode == 2 and second.stdout == "[   0.0 s] preparing the workspace\n"
    assert second.stderr.count("\n") == 1 and f"(pid {first.pid}, since 2" in second.stderr, (
        second.stderr
    )
    assert first.wait(600) == 0, (toy / "out.log").read_text()
    assert_nothing_lost(toy, faults=0)
    assert_nothing_held(toy)


@pytest.mark.slow
def test_the_second_run_can_wait_and_then_finds_everything_done(tmp_path: Path) -> None:
    toy = training_toy(tmp_path)
    first = in_the_middle(toy)
    second = rlhf("run", "--wait", cwd=toy, timeout=500)
    assert (
        second.returncode == 0
        and "waiting for `rlhf run`" in second.stdout
        and "3 cached" in second.stdout
    )
    assert first.wait(240) == 0
    assert_nothing_lost(toy, faults=0)
    assert_nothing_held(toy)


@pytest.mark.slow
def test_an_attempt_waits_for_an_earlier_one_that_was_taken_for_dead(tmp_path: Path) -> None:
    toy = make_toy(tmp_path, SLOW_STAGE)
    ensure_dvc(toy)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(run_stage, StageSpec(toy, "ppo"))
        wait_until((toy / "started").exists, 240, "start of the stage")
        second = threads.submit(run_stage, StageSpec(toy, "ppo"))
        assert (first.result(120).action, second.result(120).action) == ("ran", "cached")
    assert (toy / "started").read_text() == "x\n"


@pytest.mark.slow
def test_an_attempt_waits_until_the_supervisor_of_a_killed_job_has_ended_everything(
    tmp_path: Path,
) -> None:
    """The stage ignores the stop signal, so that its supervisor needs the whole grace period."""
    toy = make_toy(tmp_path, "stages:\n  ppo: {cmd: python stubborn.py, outs: [policy.txt]}\n")
    (toy / "stubborn.py").write_text(
        "import pathlib, signal, time\nfirst = not pathlib.Path('started').exists()\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\npathlib.Path('started').touch()\n"
        "time.sleep(300 if first else 0)\npathlib.Path('policy.txt').write_text('p')\n"
    )
    ensure_dvc(toy)
    job = subprocess.Popen([sys.executable, "-c", _job(toy)])
    wait_until((toy / "started").exists, 240, "start of the stage")
    job.kill()
    job.wait()
    outcome = run_stage(StageSpec(toy, "ppo"))
    assert outcome.action == "ran", outcome


def _job(toy: Path) -> str:
    call = f"run_stage(StageSpec(Path({str(toy)!r}), 'ppo', grace=2.0))"
    return f"from pathlib import Path; from flows.stage import StageSpec, run_stage; {call}"
