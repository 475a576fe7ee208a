"""Threads of a stage's process: their number, and that they spin only where they are told to and have cores."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_core.config.operations import ComputeConfig
from rlhf_core.errors import ConfigError
from rlhf_core.stages.runtime.threads import SPIN_ROUNDS, limit_threads, limit_threads_of

NAMES = ("OMP_WAIT_POLICY", "OMP_NUM_THREADS", "RAYON_NUM_THREADS", "GOMP_SPINCOUNT")

SMALLEST = {
    "vocab_size": 32, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
}  # fmt: skip
COMMANDS = {
    "match": ["match", "--champion", "models/sft", "--challenger", "models/policy", "--output", "match.json"],
    "chat": ["chat", "models/policy"],
    "serve": ["serve", "--model", "models/policy", "--port", "0"],
}


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)), raising=False)


def test_the_environment_goes_before_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_threads(ComputeConfig(threads=3), parallel=1)
    assert (os.environ["OMP_NUM_THREADS"], os.environ["RAYON_NUM_THREADS"]) == ("3", "3")
    limit_threads(ComputeConfig(threads=2, spin=True), parallel=1)
    assert os.environ["OMP_NUM_THREADS"] == "3"
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    limit_threads(ComputeConfig(spin=True), parallel=1)
    assert os.environ["GOMP_SPINCOUNT"] == "7"


def test_a_workspace_limits_the_threads_of_other_commands(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text("compute: {threads: 2}\nflow: {parallel: 3}\n")
    limit_threads_of(tmp_path)
    assert os.environ["OMP_NUM_THREADS"] == "2"
    (tmp_path / "params.yaml").write_text("compute: {thread: 2}\n")
    with pytest.raises(ConfigError, match="did you mean"):
        limit_threads_of(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["match", "chat", "serve"])
def test_pytorch_is_loaded_after_the_threads_are_limited(command: str, tmp_path: Path) -> None:
    """OpenMP reads its settings once, when PyTorch loads it."""
    program = f"""
import sys
from rlhf_core.stages.runtime import threads
def limited(workspace):
    print("loaded" if "torch" in sys.modules else "not loaded", workspace)
    raise SystemExit(0)
threads.limit_threads_of = limited
from {"rlhf_core" if command == "match" else "flows"}.cli import app
app({COMMANDS[command]!r})
"""
    for name in ("params.yaml", "dvc.yaml"):
        (tmp_path / name).touch()
    for name in ("sft", "policy"):
        LlamaForCausalLM(LlamaConfig(**SMALLEST)).save_pretrained(tmp_path / "models" / name)
    ran = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.stdout.strip().splitlines()[-1:] == [f"not loaded {tmp_path}"], ran.stderr


@pytest.mark.parametrize(
    ("threads", "parallel", "spin", "expected"),
    [
        (None, 1, True, str(SPIN_ROUNDS)),
        (2, 2, True, str(SPIN_ROUNDS)),
        (3, 2, True, None),
        (None, 2, True, None),
        (1, 1, False, None),
    ],
)
def test_threads_spin_where_every_stage_has_cores_for_them(
    threads: int | None, parallel: int, spin: bool, expected: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    limit_threads(ComputeConfig(threads=threads, spin=spin), parallel)
    assert os.environ.get("GOMP_SPINCOUNT") == expected
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    assert ("compute.spin is left out" in caplog.text) == (spin and expected is None)
