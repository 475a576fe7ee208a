"""One stage on two hosts, a rank on each, trains the same weights as two ranks on one host."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from background import running
from faults.network import Host, joined_hosts
from integration.flow_toys import environment, rlhf
from safetensors.torch import load_file
from torch import Tensor

from rlhf_core.training.history import read_history

pytestmark = [pytest.mark.services, pytest.mark.slow, pytest.mark.timeout(1200)]
SMALL = (
    "collect.world.demonstrations=400",
    "collect.world.preferences=800",
    "collect.world.pretrain=100",
)
PORT = 29511
RUN_STAGE = Path(__file__).resolve().parents[2] / "infra" / "launch" / "run-stage.sh"


def stage_command(workspace: Path, stage: str = "sft") -> list[str]:
    return [sys.executable, "-m", "flows.cli", "stage", stage, "--workspace", str(workspace)]


def prepared(folder: Path) -> Path:
    """Return a workspace with everything that SFT reads."""
    sets = [word for value in (*SMALL, "sft.steps=12") for word in ("--set", value)]
    made = rlhf("init", str(folder), "--profile", "smoke", *sets, cwd=folder.parent)
    assert made.returncode == 0, made.stderr
    for stage in ("collect", "validate", "base"):
        done = rlhf("stage", stage, cwd=folder, timeout=600, RLHF_TRACKING="off")
        assert done.returncode == 0, done.stderr
    return folder


def launch(workspace: Path, text: str) -> None:
    file = workspace / "params.yaml"
    assert "launch: {}" in file.read_text()
    file.write_text(file.read_text().replace("launch: {}", f"launch: {{sft: {text}}}"))


def weights(workspace: Path, model: str = "sft") -> dict[str, Tensor]:
    return load_file(workspace / "models" / model / "model.safetensors")


def test_two_hosts_train_what_two_ranks_on_one_host_train(tmp_path: Path) -> None:
    with joined_hosts(2) as hosts:
        near = prepared(tmp_path / "near")
        far, script, sharded = (
            Path(shutil.copytree(near, tmp_path / name)) for name in ("far", "script", "sharded")
        )
        launch(near, "{processes: 2}")
        alone = rlhf("stage", "sft", cwd=near, timeout=600, RLHF_TRACKING="off")
        assert alone.returncode == 0, alone.stderr

        meet = f"processes: 1, nodes: 2, rendezvous: '{hosts[0].name}:{PORT}'"
        launch(far, f"{{{meet}}}")
        train_on(hosts, far, stage_command(far))
        assert_same(weights(near), weights(far))

        if importlib.util.find_spec("deepspeed"):
            launch(sharded, f"{{{meet}, engine: deepspeed, zero: 3}}")
            train_on(hosts, sharded, stage_command(sharded))
            assert_same_but_for_rounding(near, sharded)

        meeting = {"NNODES": "2", "MASTER_ADDR": hosts[0].name, "MASTER_PORT": str(PORT + 1)}
        train_on(hosts, script, [str(RUN_STAGE), "sft"], RLHF_WORKSPACE=str(script), **meeting)
        assert_same(weights(near), weights(script))
        dvc = [sys.executable, "-m", "dvc", "status", "--json", "sft"]
        recorded = subprocess.run(
            dvc, cwd=script, env=environment(), capture_output=True, text=True
        )
        assert recorded.stdout.strip() == "{}", recorded.stdout + recorded.stderr


def assert_same(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    assert set(one) == set(two)
    for name, expected in one.items():
        torch.testing.assert_close(two[name], expected, rtol=1e-5, atol=1e-6)


def assert_same_but_for_rounding(near: Path, sharded: Path) -> None:
    """Expect the same training of engines that add the same numbers in another order.

    Adam divides a gradient by its own size. Where that is near zero, rounding decides on the step,
    so that single weights differ by a part of a learning rate, whatever adds up. Trained in
    float64, either engine is as far away from it, at the same weights, by 2e-5 of all updates. So
    updates are compared as a whole, tensor by tensor, and losses; a gradient of one rank that is
    left out, or a wrong divisor, changes those by percents.
    """
    start = weights(near, "base")
    one, two = weights(near), weights(sharded)
    assert set(one) == set(two) == set(start)
    for name, first in start.items():
        update = (one[name] - first).norm()
        assert (two[name] - one[name]).norm() < 1e-3 * update, name
    rows = [read_history(workspace / "history/sft.jsonl") for workspace in (near, sharded)]
    for expected, found in zip(*rows, strict=True):
        for name in expected.keys() & {"loss", "validation_loss", "grad_norm"}:
            assert found[name] == pytest.approx(expected[name], rel=1e-5), name


def train_on(hosts: Sequence[Host], workspace: Path, command: list[str], **extra: str) -> None:
    """Run the same command on both hosts, as in docs/engines.md, and expect both to succeed."""
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = environment(RLHF_TRACKING="off", OMP_NUM_THREADS="1", PATH=programs, **extra)
    logs = workspace.parent / f"logs-{workspace.name}"
    with (
        running([*hosts[0].prefix, *command], logs, env | {"NODE_RANK": "0"}, "one.log") as first,
        running([*hosts[1].prefix, *command], logs, env | {"NODE_RANK": "1"}, "two.log") as second,
    ):
        try:
            codes = first.wait(600), second.wait(600)
        except subprocess.TimeoutExpired:
            codes = (-1, -1)
    output = "\n".join(file.read_text() for file in sorted(logs.iterdir()))
    assert codes == (0, 0), output
