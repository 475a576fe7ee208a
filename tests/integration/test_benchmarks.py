"""Every benchmark that needs no finished workspace runs in its smallest form: the code that it measures changes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "options", "column"),
    [
        ("checkpoints", "--millions 1 --every 1 --rounds 1 --threads 1", "share"),
        ("data_scale", "--pairs 200", "pairs"),
        ("float32_products", "--rows 64 --hidden 32 --passes 1 --repeats 1", "64 rows"),
        ("evaluation_ranks", "--prompts 4 --processes 1", "prompts"),
        ("ppo_throughput", "--prompt 4 --reply 4 --iterations 1 --threads 1 --set ppo.batch_size=8", "of the roofline"),
        ("token_cache", "--pairs 300", "held beside texts"),
        ("vocabulary_memory", "--vocabulary 2000 --hidden 16 --repeats 1 --threads 1", "whole"),
    ],
)
def test_prints_its_table(name: str, options: str, column: str) -> None:
    command = [sys.executable, "-m", f"benchmarks.{name}", *options.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert column in done.stdout
