"""The clock is set back and forward by hours under `rlhf up`: the schedule keeps running, once for
all late runs.
"""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from background import wait_until
from faults.toys import assert_nothing_held, rows, training_toy
from integration.flow_toys import begin, environment, rlhf

from flows.workspace import workspace_slug

pytestmark = [pytest.mark.services, pytest.mark.slow, pytest.mark.timeout(3600)]
SOURCE = Path(__file__).resolve().with_name("shifted_clock.c")
HOURS = 2 * 3600
SCHEDULED = "auto_scheduled = 1 and created_by like '%SCHEDULE%'"


class Toy:
    """A workspace with `rlhf up` and a schedule, whose processes all have a clock that can be
    moved.
    """

    def __init__(self, folder: Path) -> None:
        self.shift, library = folder / "shift", folder / "clock.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(SOURCE)], check=True)
        self.move_to(0)
        self.env = {"LD_PRELOAD": str(library), "SHIFTED_CLOCK": str(self.shift)}
        self.workspace = training_toy(folder / "toy", pace=0.0)
        self.up = begin("up", cwd=self.workspace, **self.env)
        wait_until(lambda: "Ctrl-C" in self.log() or self.up.poll() is not None, 900, "services")
        self.url = json.loads((self.workspace / ".rlhf" / "services.json").read_text())["api_url"]

    def move_to(self, seconds: int) -> None:
        """From now on, show this much more than the true time."""
        with self.shift.open("r+b" if self.shift.exists() else "wb") as file:
            file.write(struct.pack("<q", seconds))

    def schedule(self, seconds: int) -> None:
        """Have the pipeline run every ``seconds``."""
        deployment = f"rlhf-pipeline/pipeline-{workspace_slug(self.workspace)}"
        command = [sys.executable, "-m", "prefect", "deployment", "schedule", "create", deployment]
        env = environment(
            PREFECT_API_URL=self.url, PREFECT_HOME=str(self.workspace / "client"), **self.env
        )
        subprocess.run(
            [*command, "--interval", str(seconds)],
            env=env,
            check=True,
            capture_output=True,
            timeout=400,
        )

    def count(self, condition: str) -> int:
        """Return how many flow runs of the schedule meet ``condition``."""
        return int(
            str(
                rows(
                    self.workspace,
                    f"select count(*) from flow_run where {SCHEDULED} and {condition}",
                )[0][0]
            )
        )

    def log(self) -> str:
        return (self.workspace / "out.log").read_text()


@pytest.fixture
def toy(tmp_path: Path) -> Iterator[Toy]:
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler for a clock that can be moved")
    toy = Toy(tmp_path)
    try:
        yield toy
    finally:
        toy.up.terminate()
        toy.up.wait(60)
    assert_nothing_held(toy.workspace)


def test_a_clock_set_back_and_forward_leaves_the_schedule_alive_and_runs_once(toy: Toy) -> None:
    toy.schedule(45)
    wait_until(lambda: toy.count("state_type = 'COMPLETED'") >= 1, 900, "scheduled run")

    toy.move_to(-HOURS)
    wait_until(lambda: "the clock was set back by 72" in toy.log(), 200, "notice of the jump")
    answer = rlhf("run", cwd=toy.workspace, timeout=900, **toy.env)
    assert answer.returncode == 0 and "3 cached" in answer.stdout, answer.stdout + answer.stderr

    before = toy.count("state_type = 'COMPLETED'")
    jumped = datetime.now(UTC)
    toy.move_to(HOURS)
    wait_until(
        lambda: toy.count("state_type = 'CANCELLED' and state_name = 'Cancelled'") >= 20,
        900,
        "cancelled late runs",
    )
    wait_until(
        lambda: toy.count("state_type = 'COMPLETED'") >= before + 2,
        900,
        "scheduled runs after the jump",
    )
    # Of the hundreds that came due in the hours that were skipped one run catches up, and few more
    # at the rim.
    skipped = " and ".join(
        f"expected_start_time {side} '{jumped + timedelta(seconds=shift):%Y-%m-%d %H:%M:%S}'"
        for side, shift in ((">", -HOURS), ("<", HOURS))
    )
    assert toy.count(skipped) >= 20, "the database has times in this form"
    assert toy.count(f"{skipped} and start_time is not null and state_type != 'CANCELLED'") <= 6
