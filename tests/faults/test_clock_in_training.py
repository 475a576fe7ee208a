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

from rlhf_core.stages.runtime.launcher import StageExit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
SOURCE = Path(__file__).resolve().with_name("shifted_clock.c")
TESTS = Path(__file__).resolve().parents[1]
# One process without a fault; one whose clock is set forward and that is killed behind a
# checkpoint; and one that goes on there, whose clock was set back meanwhile and is so again.
PROGRAM = """
import os, struct, sys
from functools import partial
from pathlib import Path
from unit.training import tiny
from rlhf_core.stages.runtime.runner import run_stage
from rlhf_core.training.engine.base import LocalEngine

DAY, folder, shift = 86400, Path.cwd(), Path(os.environ["SHIFTED_CLOCK"])

def move_to(days):
    with shift.open("r+b") as file:
        file.write(struct.pack("<q", days * DAY))

def stepping(*actions):
    for step, action in actions:
        LocalEngine.step = tiny.at_step(step, action)

for name in ("alone", "moved"):
    tiny.make_workspace(folder / name)
    (folder / name / "params.yaml").write_text(tiny.PARAMS)
run_stage("sft", folder / "alone")
plain = LocalEngine.step
child = os.fork()
if not child:
    die = partial(tiny.die_behind, "step-000003", folder / "moved/work")
    stepping((1, partial(move_to, 30)), (4, die))
    run_stage("sft", folder / "moved")
assert os.waitpid(child, 0)[1] == 9
move_to(-30)
LocalEngine.step = plain
stepping((5, partial(move_to, -90)))
os.environ.pop("RLHF_TRACKING")
run_stage("sft", folder / "moved")
"""


def test_a_clock_that_jumps_while_a_stage_trains(tmp_path: Path) -> None:
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
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    alone, moved = tmp_path / "alone", tmp_path / "moved"
    for file in ("models/sft/model.safetensors", "models/sft/tokenizer.json"):
        assert (alone / file).read_bytes() == (moved / file).read_bytes(), file
    rows = [json.loads(line) for line in (moved / "history/sft.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows]
    assert steps == sorted(steps) and steps[-1] == 8
    for row in rows:
        for name, value in row.items():
            if "seconds" in name:
                assert 0 <= value < 3600, row
    outcome = json.loads((moved / ".rlhf/outcomes/sft.json").read_text())
    assert 0 < outcome["seconds"] < 3600 and outcome["ended"] > outcome["started"]
    assert StageExit.load(moved / ".rlhf/outcomes/sft.json") is not None
    with sqlite3.connect(moved / "mlflow.db") as database:
        (times,) = database.execute("SELECT start_time, end_time FROM runs").fetchall()
        stamps = database.execute("SELECT timestamp FROM metrics ORDER BY rowid").fetchall()
    assert times[1] >= times[0]
    assert stamps == sorted(stamps) and stamps
