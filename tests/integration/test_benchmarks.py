"""A benchmark that needs no finished workspace runs in its smallest form: the code that it measures changes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


def test_ppo_throughput_prints_its_table() -> None:
    options = "--prompt 4 --reply 4 --iterations 1 --threads 1 --set ppo.batch_size=8"
    command = [sys.executable, "-m", "benchmarks.ppo_throughput", *options.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "of the roofline" in done.stdout
