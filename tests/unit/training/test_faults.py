"""Faults of a training: it loses its place, dies while it writes a checkpoint, finds the disk full,
changes machines.

Each ends, after another start, with the very weights of a run that was left alone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ranks import exit_code_of
from small_disk import small_disk
from unit.ppo.rollback_runs import dying
from unit.training import tiny

from rlhf_core.errors import EXIT_PREEMPTED, CheckpointError, Preempted
from rlhf_core.runtime.preemption import PreemptionSignal
from rlhf_core.stages.runtime.runner import run_stage
from rlhf_core.storage.files import sha256_file
from rlhf_core.training.checkpoints import manager
from rlhf_core.training.checkpoints.checkpoint import HostCopies, load_latest
from rlhf_core.training.engine.base import LocalEngine, StepResult

ROOT = Path(__file__).resolve().parents[3]
STAGES = ("sft", "reward", "critic")


@pytest.fixture(scope="module")
def whole(workspace: Path) -> dict[str, Path]:
    """Where the three stages ended that met no fault."""
    for name in STAGES:
        tiny.run_stage(name, workspace, f"undisturbed-{name}")
    return {name: workspace / f"undisturbed-{name}" for name in STAGES}


def told_to_stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def assert_same(one: Path, other: Path, name: str) -> None:
    for file in (f"models/{name}/model.safetensors", f"models/{name}/tokenizer.json"):
        assert sha256_file(one / file) == sha256_file(other / file), file
    assert tiny.without_clock(one / f"history/{name}.jsonl") == tiny.without_clock(
        other / f"history/{name}.jsonl"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", STAGES)
def test_a_stage_that_loses_its_place_saves_its_step_and_goes_on_from_there(
    name: str, workspace: Path, whole: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = f"{name}-preempted"
    with monkeypatch.context() as patch:
        # The fifth step is between two checkpoints, and so is the critic's third rollout, which
        # begins with its ninth.
        patch.setattr(LocalEngine, "step", tiny.at_step(8 if name == "critic" else 4, told_to_stop))
        message = rf"{name} made \w+ \d of \d .* goes on from there"
        preemption = PreemptionSignal()
        with pytest.raises(Preempted, match=message) as raised, preemption.handled(name):
            tiny.run_stage(name, workspace, out, preemption)
    assert raised.value.exit_code == EXIT_PREEMPTED
    saved = load_latest(workspace / out / "work/checkpoints")
    assert saved is not None and saved.step == (3 if name == "critic" else 5)
    assert not (workspace / out / f"models/{name}").exists()
    tiny.run_stage(name, workspace, out)
    assert_same(workspace / out, whole[name], name)


def half_a_state() -> None:
    """Of the second state file only the first half reaches the disk."""
    original, calls = manager.write_pieces, []

    def write_pieces(path: Path, pieces: Any) -> None:
        original(path, pieces)
        calls.append(path)
        if len(calls) == 2:
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    manager.write_pieces = write_pieces  # type: ignore[assignment]


def half_of_what_is_waited_for() -> None:
    """There is no room for copies."""
    HostCopies._room = lambda self: 0  # type: ignore[method-assign]
    half_a_state()


# How a process dies while it writes a checkpoint, and what it leaves.
MOMENTS: dict[str, tuple[Callable[[], None], list[str]]] = {
    "while-it-is-copied": (dying(HostCopies, "copy", 2, after=False), ["step-000003"]),
    "half-a-state": (half_a_state, [".building-000006", "step-000003"]),
    "half-of-what-is-waited-for": (half_of_what_is_waited_for, [".building-000006", "step-000003"]),
    # A checkpoint writes its meta and its manifest. It flushes six times: the state, the history,
    # these two, its folder, and the folder around it once it has its name there.
    "before-the-manifest": (
        dying(manager, "_write_text", 4, after=False),
        [".building-000006", "step-000003"],
    ),
    "before-it-has-its-name": (
        dying(manager, "fsync_path", 11, after=False),
        [".building-000006", "step-000003"],
    ),
    "when-it-has-its-name": (
        dying(manager, "fsync_path", 12, after=False),
        ["step-000003", "step-000006"],
    ),
    # Two are kept: the third checkpoint is the first after which one goes.
    "before-the-old-one-goes": (
        dying(manager.shutil, "rmtree", 1, after=False),
        ["step-000003", "step-000006", "step-000008"],
    ),
}


def run_and_die_at(workspace: Path, moment: str) -> None:
    MOMENTS[moment][0]()
    tiny.run_stage("sft", workspace, moment)


@pytest.mark.slow
def test_kill_9_in_a_checkpoint_costs_that_checkpoint_alone(
    workspace: Path, whole: dict[str, Path]
) -> None:
    for moment, (_, left) in MOMENTS.items():
        checkpoints = workspace / moment / "work/checkpoints"
        assert exit_code_of(run_and_die_at, workspace, moment) == -signal.SIGKILL, moment
        assert sorted(path.name for path in checkpoints.iterdir()) == left
        tiny.run_stage("sft", workspace, moment)
        assert_same(workspace / moment, whole["sft"], "sft")
        assert not list(checkpoints.glob(".building-*"))


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_training_goes_on_later(
    workspace: Path, whole: dict[str, Path]
) -> None:
    checkpoint = next((whole["sft"] / "work/checkpoints").glob("step-*"))
    needed = sum(path.stat().st_size for path in checkpoint.iterdir())
    work = workspace / "full/work"
    with small_disk(
        work, needed * 3 // 2 + 65536
    ):  # room for one checkpoint and its history, not for two
        with pytest.raises(CheckpointError) as raised:
            tiny.run_stage("sft", workspace, "full")
        message = str(raised.value)
        assert (
            "no space left on the device; make room and run again: it goes on from step 3"
            in message
        )
        assert "\n" not in message
        assert [path.name for path in (work / "checkpoints").iterdir()] == ["step-000003"]
        kept = load_latest(work / "checkpoints")
        assert kept is not None and kept.step == 3
        subprocess.run(["mount", "-o", f"remount,size={10 * needed}", str(work)], check=True)
        tiny.run_stage("sft", workspace, "full")
        assert_same(workspace / "full", whole["sft"], "sft")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Makes a workspace with the parameters above and some more."""
    monkeypatch.setenv("RLHF_TRACKING", "off")

    def make(name: str, more: str = "") -> Path:
        tiny.make_workspace(tmp_path / name)
        (tmp_path / name / "params.yaml").write_text(tiny.PARAMS + more)
        return tmp_path / name

    return make


def keys(workspace: Path) -> list[str]:
    return [path.name for path in (workspace / "work/sft").iterdir()]


@pytest.mark.slow
def test_another_machine_goes_on(
    place: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    alone, first, second = (
        place("alone", ""),
        *(place(n, "checkpoints: {store: ../store}") for n in ("one", "two")),
    )
    with monkeypatch.context() as patch:
        patch.setattr(LocalEngine, "step", tiny.at_step(6, told_to_stop))
        for workspace in (alone, first):
            with pytest.raises(Preempted, match="sft made step 7 of 8"):
                run_stage("sft", workspace)
    outcome = json.loads((first / ".rlhf/outcomes/sft.json").read_text())
    assert outcome["exit_code"] == EXIT_PREEMPTED and "step 7 of 8" in outcome["message"]
    assert keys(first) == keys(alone)  # where checkpoints go is no part of what is computed
    store = tmp_path / "store" / "sft" / keys(first)[0]
    # The last one pushes none of the regular ones out, and goes with the next of them.
    assert sorted(path.stem for path in store.glob("*.json")) == [
        "step-000003",
        "step-000006",
        "step-000007",
    ]

    steps: list[int] = []
    original = LocalEngine.step

    def counted(engine: LocalEngine) -> StepResult:
        steps.append(engine.steps)
        return original(engine)

    monkeypatch.setattr(LocalEngine, "step", counted)
    run_stage("sft", second)
    assert steps == [7]
    run_stage("sft", alone)
    assert_same(second, alone, "sft")
    assert not list(store.rglob("*.json")) and not (second / "work/sft").exists()


def test_a_store_that_cannot_be_used_is_refused_before_any_training(
    place: Callable[[str, str], Path],
) -> None:
    workspace = place("one", "checkpoints: {store: 'nowhere://x'}")
    with pytest.raises(
        CheckpointError, match=r"checkpoints\.store nowhere://x cannot be used: Protocol not known"
    ):
        run_stage("sft", workspace)
    assert json.loads((workspace / ".rlhf/outcomes/sft.json").read_text())["exit_code"] == 2


@pytest.mark.slow
def test_the_command_ends_with_a_status_of_its_own_and_one_line(
    place: Callable[[str, str], Path],
) -> None:
    workspace = place("one", "")
    (workspace / "params.yaml").write_text(tiny.PARAMS.replace("steps: 8", "steps: 1000000"))
    command = [sys.executable, "-m", "flows.cli", "stage", "sft", "--workspace", str(workspace)]
    process = subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not list(workspace.glob("work/sft/*/checkpoints/step-*")):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=300)
    assert process.returncode == EXIT_PREEMPTED
    assert "Traceback" not in said and said.splitlines()[-1].startswith("rlhf: sft made step ")
    assert said.splitlines()[-1].endswith(
        "its state is saved, and the same command goes on from there"
    )
