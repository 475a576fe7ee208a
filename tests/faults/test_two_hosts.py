"""One stage on two hosts, a rank on each: what `rlhf stage` trains there is what two ranks on one host train."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "integration"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from away import running
from flow_toys import environment, rlhf
from network import Host, two_hosts

pytestmark = [pytest.mark.services, pytest.mark.slow, pytest.mark.timeout(1200)]
SMALL = ("collect.world.demonstrations=400", "collect.world.preferences=800", "collect.world.pretrain=100")
PORT = 29511


def prepared(folder: Path) -> Path:
    """A workspace in which all is there that SFT reads."""
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


def weights(workspace: Path) -> dict[str, object]:
    from safetensors.torch import load_file

    return dict(load_file(workspace / "models" / "sft" / "model.safetensors"))


def test_two_hosts_train_what_two_ranks_on_one_host_train(tmp_path: Path) -> None:
    import torch

    with two_hosts() as hosts:
        near = prepared(tmp_path / "near")
        far = Path(shutil.copytree(near, tmp_path / "far"))
        launch(near, "{processes: 2}")
        launch(far, f"{{processes: 1, nodes: 2, rendezvous: '{hosts[0].name}:{PORT}'}}")
        alone = rlhf("stage", "sft", cwd=near, timeout=600, RLHF_TRACKING="off")
        assert alone.returncode == 0, alone.stderr
        train_on(hosts, far)
    one, two = weights(near), weights(far)
    assert set(one) == set(two)
    for name, expected in one.items():
        torch.testing.assert_close(two[name], expected, rtol=1e-5, atol=1e-6)


def train_on(hosts: tuple[Host, Host], workspace: Path) -> None:
    """The same command on both hosts, as docs/engines.md has it; both end well."""
    env = environment(RLHF_TRACKING="off", OMP_NUM_THREADS="1")
    command = [sys.executable, "-m", "flows.cli", "stage", "sft", "--workspace", str(workspace)]
    logs = workspace.parent / "logs"
    with (
        running([*hosts[0].prefix, *command], logs, env, "one.log") as first,
        running([*hosts[1].prefix, *command], logs, env, "two.log") as second,
    ):
        try:
            codes = first.wait(600), second.wait(600)
        except subprocess.TimeoutExpired:
            codes = (-1, -1)
    said = "\n".join(file.read_text() for file in sorted(logs.iterdir()))
    assert codes == (0, 0), said
