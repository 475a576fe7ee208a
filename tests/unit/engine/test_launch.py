"""A stage that starts its own ranks: the outcome, a rank or a build that dies, and resuming with
other ranks.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from unit.training import tiny

from rlhf_core.config.loading import check_params
from rlhf_core.errors import EXIT_PREEMPTED, EXIT_USER_ERROR, ConfigError, RlhfError
from rlhf_core.stages.runtime import launcher
from rlhf_core.stages.runtime.runner import run_stage
from rlhf_core.training.engine.base import LocalEngine
from rlhf_core.training.engine.deepspeed import remove_stale_build_locks
from rlhf_core.training.history import CLOCK_FIELDS

TWO = "compute: {launch: {sft: {processes: 2}}}\n"
FAULTY_RANK = str(Path(__file__).with_name("faulty_rank.py"))


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLHF_TRACKING", "off")
    tiny.make_workspace(tmp_path)
    shutil.rmtree(tmp_path / "models/sft")  # the stage under test makes it
    (tmp_path / "params.yaml").write_text(tiny.PARAMS)
    return tmp_path


def results(
    workspace: Path,
) -> tuple[dict[str, torch.Tensor], list[dict[str, float]], dict[str, float]]:
    """Weights, history and metrics of the finished stage."""
    metrics = json.loads((workspace / "metrics/sft.json").read_text())
    return (
        load_file(workspace / "models/sft/model.safetensors"),
        tiny.without_clock(workspace / "history/sft.jsonl"),
        {name: value for name, value in metrics.items() if name not in CLOCK_FIELDS},
    )


def interrupt() -> None:
    """As Ctrl-C does it."""
    raise KeyboardInterrupt


def assert_same(left: Path, right: Path) -> None:
    (a, first, one), (b, second, two) = results(left), results(right)
    assert a.keys() == b.keys()
    assert all(torch.allclose(a[name], b[name], rtol=1e-3, atol=1e-5) for name in a)
    assert [row["step"] for row in first] == [row["step"] for row in second]
    for row, other in zip(first, second, strict=True):
        assert row == pytest.approx(other, rel=1e-3, abs=1e-5)
    assert one == pytest.approx(two, rel=1e-3, abs=1e-5)


@pytest.mark.slow
def test_one_of_two_ranks_dies_one_process_goes_on_and_two_ranks_finish(
    workspace: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = tmp_path_factory.mktemp("alone")
    monkeypatch.setenv("RLHF_TRACKING", "off")
    tiny.make_workspace(alone)
    (alone / "params.yaml").write_text(tiny.PARAMS)
    run_stage("sft", alone)

    (workspace / "params.yaml").write_text(tiny.PARAMS + TWO)
    with monkeypatch.context() as patch:
        patch.setattr(launcher, "RANK", (FAULTY_RANK, "killed"))
        with pytest.raises(RlhfError, match="rank 1 of 2 was killed by SIGKILL") as raised:
            run_stage("sft", workspace)
    assert raised.value.exit_code == 1
    outcome = json.loads((workspace / ".rlhf/outcomes/sft.json").read_text())
    assert outcome["exit_code"] == 1 and "rank 1 of 2" in outcome["message"]
    assert [path.name for path in workspace.glob("work/sft/*/checkpoints/step-*")] == [
        "step-000003"
    ]
    assert not (workspace / "models/sft").exists()

    # One process goes on, until it is interrupted; two ranks finish.
    (workspace / "params.yaml").write_text(tiny.PARAMS)
    with monkeypatch.context() as patch:
        patch.setattr(LocalEngine, "step", tiny.at_step(7, interrupt))
        with pytest.raises(KeyboardInterrupt):
            run_stage("sft", workspace)
    found = sorted(path.name for path in workspace.glob("work/sft/*/checkpoints/step-*"))
    assert found == ["step-000003", "step-000006"]
    (workspace / "params.yaml").write_text(tiny.PARAMS + TWO)
    run_stage("sft", workspace)
    assert_same(workspace, alone)
    assert len([path for path in (workspace / ".rlhf/tokens").iterdir() if path.is_dir()]) == 2, (
        "train and validation"
    )
    # A rank that is stopped while it writes its outcome leaves a hidden part.
    assert sorted(path.name for path in (workspace / ".rlhf/outcomes").glob("[!.]*")) == [
        "sft.json"
    ]


@pytest.mark.slow
def test_ranks_that_lose_their_place_stop_at_the_same_step(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(psutil.Process().children())
    (workspace / "params.yaml").write_text(tiny.PARAMS + TWO)
    monkeypatch.setattr(launcher, "RANK", (FAULTY_RANK, "stopped"))
    with pytest.raises(
        RlhfError, match="sft made step 6 of 8 and was stopped there by SIGTERM"
    ) as raised:
        run_stage("sft", workspace)
    assert raised.value.exit_code == EXIT_PREEMPTED
    outcome = json.loads((workspace / ".rlhf/outcomes/sft.json").read_text())
    assert outcome["exit_code"] == EXIT_PREEMPTED
    found = sorted(path.name for path in workspace.glob("work/sft/*/checkpoints/step-*"))
    assert found == ["step-000003", "step-000006"]
    assert set(psutil.Process().children()) <= before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "settings", "message", "exit_code"),
    [
        (
            "hangs",
            "",
            r"have waited \d+ s in .* for rank 1 of 2 \(process \d+ on .*rank_timeout",
            1,
        ),
        (
            "hangs when stopped",
            "flow: {stop_grace_seconds: 10}\n",
            "for rank 1 of 2 .* after SIGTERM",
            EXIT_PREEMPTED,
        ),
        ("out of memory", "", "2.00 GiB; `rlhf plan` says what fits", EXIT_USER_ERROR),
    ],
)
def test_a_rank_that_hangs_or_has_no_memory_is_named_and_no_rank_is_left(
    workspace: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: str,
    settings: str,
    message: str,
    exit_code: int,
) -> None:
    before = set(psutil.Process().children())
    seconds = 15 if fault == "hangs" else 1800
    launch = f"compute: {{launch: {{sft: {{processes: 2, rank_timeout: {seconds}}}}}}}\n"
    (workspace / "params.yaml").write_text(tiny.PARAMS + launch + settings)
    monkeypatch.setattr(launcher, "RANK", (FAULTY_RANK, fault))
    with pytest.raises(RlhfError, match=message) as raised:
        run_stage("sft", workspace)
    assert raised.value.exit_code == exit_code and "\n" not in str(raised.value)
    assert set(psutil.Process().children()) <= before
    assert list((workspace / ".rlhf/ranks").iterdir()) == []
    warned = [record.getMessage() for record in caplog.records if "rank 1 of 2" in record.message]
    assert bool(warned) == (fault == "hangs"), "who is late is said before it is too late"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("compute: {launch: {sft: {nodes: 2}}}", "rendezvous"),
        ("compute: {launch: {sft: {rank_timeout: 0}}}", "rank_timeout"),
        ("compute: {launch: {sft: {rendezvous_timeout: -5}}}", "rendezvous_timeout"),
        ("pools: {sft: {pool: p, nodes: 2}}", "set both to the same number"),
        ("pools: {sft: {pool: p, sbatch: [--partition=a]}}", "set nodes, or leave sbatch out"),
        ("pools: {sft: {pool: p, nodes: 1, image: x}}", "image is for containers"),
        ("pools: {sft: {pool: p, nodes: 1, shared: false}}", "shared: false is for containers"),
        (
            "compute: {launch: {sft: {nodes: 2}}}\npools: {sft: {pool: p, nodes: 3}}",
            "set both to the same number",
        ),
        ("compute: {launch: {sft: {zero: 2}}}", "set engine to deepspeed"),
        ("compute: {launch: {sft: {frozen: sharded}}}", "set engine to deepspeed"),
        ("compute: {launch: {ppo: {engine: deepspeed, offload: parameters}}}", "needs zero 3"),
        (
            "compute: {launch: {ppo: {engine: deepspeed, zero: 0, offload: optimizer}}}",
            "zero 1 or more",
        ),
        (
            "compute: {launch: {ppo: {engine: deepspeed, zero: 3, deepspeed: x.json}}}",
            "leave out zero",
        ),
        ("compute: {launch: {evaluate: {processes: 2, frozen: offload}}}", "frozen to sharded"),
        (
            "compute: {launch: {ppo: {engine: deepspeed}}}\nppo: {gradient_norm: joint}",
            "gradient_norm joint",
        ),
        (
            "compute: {launch: {ppo: {engine: deepspeed}}}\nppo: {critic_mode: shared}",
            "engine local alone",
        ),
        ("ppo: {critic_mode: shared, critic_lora: {rank: 2}}", "set critic_lora to null"),
        ("ppo: {critic_mode: shared}\ncritic: {lora: {rank: 2}}", "leave critic.lora out"),
        (
            "compute: {launch: {ppo: {frozen: offload}}}\nppo: {kl: {estimator: full, placement: loss}}",
            "cannot wait in CPU memory",
        ),
    ],
)
def test_contradictory_settings_are_refused(text: str, message: str) -> None:
    from rlhf_core.config import yaml_text

    with pytest.raises(ConfigError, match=message):
        check_params(yaml_text.parse(text, "params.yaml"))


def test_old_locks_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    old, new, other = (
        tmp_path / "py" / name for name in ("old/lock", "new/lock", "old/build.ninja")
    )
    for file in (old, new, other):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    an_hour_ago = time.time() - 3600
    for file in (old, other):
        os.utime(file, (an_hour_ago, an_hour_ago))
    with caplog.at_level(logging.WARNING):
        remove_stale_build_locks()
    assert not old.exists() and new.exists() and other.exists()
    # PyTorch, too, may warn here: where there is a CUDA compiler and no GPU.
    said = [record.getMessage() for record in caplog.records if record.name.startswith("rlhf_core")]
    assert said == [f"removed {old}, which a build that was killed 60 minutes ago left behind"]


def test_without_an_extension_folder_nothing_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "none"))
    remove_stale_build_locks()
