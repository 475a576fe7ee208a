"""The acceptance of several GPUs, tried without any: two processes on the CPU, tiny sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.harness import distance

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_that_several_gpus_do_together_passes_on_two_processes(tmp_path: Path) -> None:
    output = tmp_path / "found.json"
    command = [sys.executable, "-m", "benchmarks.gpu_acceptance", "--gpus", "2", "--dry"]
    ended = subprocess.run(
        [*command, "--output", str(output)], cwd=ROOT, env=os.environ | {"RLHF_DEVICE": "cpu"},
        text=True, capture_output=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    steps = json.loads(output.read_text())["steps"]
    assert all(step["passed"] for step in steps.values())
    skipped = {name for name, step in steps.items() if step["skipped"]}
    assert skipped == {"vLLM by files", "vLLM by NCCL"}
    assert steps["sums and gatherings"]["found"]["backend"] == "gloo"
    assert set(steps["a step as on one rank"]["found"]) == {"local", "ZeRO 1", "ZeRO 2", "ZeRO 3"}
    struck = steps["a killed rank, a hung rank, and the end"]["found"]
    assert (struck["killed"]["exit"], struck["hung"]["exit"]) == (1, 1)
    (speeds,) = steps["PPO throughput"]["found"].values()
    phases = {"generation", "forward", "rewards", "update", "iteration"}
    assert set(speeds["tokens_per_second_per_gpu"]) == phases
    assert "By gloo" in output.with_suffix(".txt").read_text()


def test_a_step_is_compared_by_the_size_of_the_change() -> None:
    change = {"weight": torch.tensor([3.0, 4.0])}
    assert distance(change, change) == 0.0
    assert distance({"weight": change["weight"] / 2}, change) == pytest.approx(0.5)
    assert distance({"other": change["weight"]}, change) == float("inf")
    still = {"weight": torch.zeros(2)}
    assert distance(still, still) == float("inf"), "a step that moves nothing shows nothing"
