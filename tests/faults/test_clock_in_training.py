"""The clock is set forward and back while a stage trains: weights, history and times stay right."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from unit.training.tiny import PARAMS, without_clock

from rlhf_core.stages.runtime.launcher import StageExit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
SOURCE = Path(__file__).resolve().with_name("shifted_clock.c")
TESTS = Path(__file__).resolve().parents[1]
# One process without a fault; one whose clock is set forward and that is killed behind a
# checkpoint; and one that goes on there, whose clock was set back meanwhile and is so again.
PROGRAM = """
import os, shutil, struct, sys
from functools import partial
from pathlib import Path
from unit.training import tiny
from rlhf_core.stages.runtime.runner import run_stage
from rlhf_core.training.engine.base import LocalEngine

DAY, folder, shift = 86400, Path.cwd(), Path(os.environ["SHIFTED_CLOCK"])
STAGE, PARAMS, CHECKPOINT = sys.argv[1:4]
FORWARD, KILLED, BACK = map(int, sys.argv[4:])

def move_to(days):
    with shift.open("r+b") as file:
        file.write(struct.pack("<q", days * DAY))

def stepping(*actions):
    for step, action in actions:
        LocalEngine.step = tiny.at_step(step, action)

for name in ("alone", "moved"):
    tiny.make_workspace(folder / name)
    models = folder / name / "models"
    shutil.copytree(models / "reward", models / "referee")
    (models / "critic").mkdir()
    (folder / name / "gates").mkdir()
    for gate in ("data", "sft", "reward"):
        (folder / name / f"gates/{gate}.pass").touch()
    (folder / name / "params.yaml").write_text(PARAMS)
run_stage(STAGE, folder / "alone")
plain = LocalEngine.step
child = os.fork()
if not child:
    die = partial(tiny.die_behind, CHECKPOINT, folder / "moved/work")
    stepping((FORWARD, partial(move_to, 30)), (KILLED, die))
    run_stage(STAGE, folder / "moved")
assert os.waitpid(child, 0)[1] == 9
move_to(-30)
LocalEngine.step = plain
stepping((BACK, partial(move_to, -90)))
os.environ.pop("RLHF_TRACKING")
run_stage(STAGE, folder / "moved")
"""


REWARD = """
seed: 3
reward: {init: base, steps: 8, batch: {token_budget: 200}, eval_every: 4, checkpoint: {every: 3}, optimizer: {lr: 0.01}}
"""
PPO = """
seed: 3
ppo: {iterations: 4, batch_size: 4, max_new_tokens: 4, warmup_iterations: 1, selection: {every: 1, prompts: 4},
      checkpoint: {every: 1, keep: 1}, health: {mode: report}, referee_every: 2, ptx: {weight: 0},
      advantage: {estimator: rloo}, replies_per_prompt: 2}
"""
# Settings, checkpoint, and the updates at which the clock is set forward, the stage is killed, and
# the clock is set back; the folder and the last step of the history.
STAGES = {
    "sft": (PARAMS, "step-000003", (1, 4, 5), "models/sft", 8),
    "reward": (REWARD, "step-000003", (1, 4, 5), "models/reward", 8),
    "ppo": (PPO, "step-000001", (0, 2, 3), "models/policy", 4),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_clock_that_jumps_while_a_stage_trains(stage: str, tmp_path: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler for a clock that can be moved")
    shift, library = tmp_path / "shift", tmp_path / "clock.so"
    shift.write_bytes(bytes(8))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(SOURCE)], check=True)
    paths = [str(TESTS), str(TESTS / "support"), str(TESTS.parent)]
    env = os.environ | {
        "LD_PRELOAD": str(library),
        "SHIFTED_CLOCK": str(shift),
        "PYTHONPATH": os.pathsep.join(paths),
        "RLHF_TRACKING": "off",
    }
    params, checkpoint, updates, model, last = STAGES[stage]
    arguments = [stage, params, checkpoint, *map(str, updates)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    alone, moved = tmp_path / "alone", tmp_path / "moved"
    for name in ("model.safetensors", "tokenizer.json"):
        file = f"{model}/{name}"
        assert (alone / file).read_bytes() == (moved / file).read_bytes(), file
    history = f"history/{stage}.jsonl"
    assert without_clock(alone / history) == without_clock(moved / history)
    rows = [json.loads(line) for line in (moved / history).read_text().splitlines()]
    counter = "iteration" if stage == "ppo" else "step"
    steps = [row[counter] for row in rows]
    assert steps == sorted(steps) and steps[-1] == last
    for row in rows:
        for name, value in row.items():
            if "seconds" in name:
                assert 0 <= value < 3600, row
    outcome = json.loads((moved / f".rlhf/outcomes/{stage}.json").read_text())
    assert 0 < outcome["seconds"] < 3600 and outcome["ended"] > outcome["started"]
    assert StageExit.load(moved / f".rlhf/outcomes/{stage}.json") is not None
    with sqlite3.connect(moved / "mlflow.db") as database:
        (times,) = database.execute("SELECT start_time, end_time FROM runs").fetchall()
        stamps = database.execute("SELECT timestamp FROM metrics ORDER BY rowid").fetchall()
    assert times[1] >= times[0]
    assert stamps == sorted(stamps) and stamps
