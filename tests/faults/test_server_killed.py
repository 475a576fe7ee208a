"""An external Prefect server is killed with -9 in the middle of a training, and the run continues."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from lasting import ACTIVE, LastingServer
from toys import assert_nothing_lost, in_the_middle, processes_of, training_toy

pytestmark = [pytest.mark.services, pytest.mark.slow]


def test_a_run_survives_ten_seconds_without_an_external_server(tmp_path: Path) -> None:
    toy, server = training_toy(tmp_path / "toy", pace=1.0), LastingServer(tmp_path / "server")
    try:
        server.start()
        run = in_the_middle(toy, **server.env)
        server.kill()
        time.sleep(10)
        server.start()
        assert run.wait(600) == 0, (toy / "out.log").read_text()
        assert_nothing_lost(toy, faults=0)
        assert processes_of(toy) == [] and server.runs(ACTIVE) == []
    finally:
        server.kill()
