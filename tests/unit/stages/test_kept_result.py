"""The result of a finished stage survives a kill of DVC before it has recorded it."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from integration.flow_toys import environment
from unit.training import tiny

from rlhf_core.stages.runtime.kept_result import KeptResult
from rlhf_core.storage.files import sha256_tree


@pytest.fixture
def outputs(tmp_path: Path) -> dict[str, Path]:
    """A model's folder and metrics, as a stage leaves them."""
    model, metrics = tmp_path / "models/sft", tmp_path / "metrics/sft.json"
    for file, text in ((model / "a/weights", "w" * 9), (metrics, '{"loss": 0.5}')):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return {"model": model, "metrics": metrics, "absent": tmp_path / "plots"}


def test_a_result_that_dvc_has_not_recorded_is_taken_once_for_the_same_computation(
    tmp_path: Path, outputs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = KeptResult(tmp_path, "sft")
    kept.keep("key", outputs, {})
    assert not kept.exists(), "without DVC nothing records it, and nothing is kept"
    monkeypatch.setenv("DVC_STAGE", "dvc.yaml:sft")
    (tmp_path / "dvc.lock").write_text("stages: {sft: {cmd: x}, ppo: {cmd: x}}\n")
    kept.keep("key", outputs, {"data/clean/pretrain/train": {"digest": "1"}})
    before = sha256_tree(outputs["model"])
    for path in (outputs["model"].parent, outputs["metrics"].parent):
        shutil.rmtree(path)
        path.mkdir()

    assert kept.is_of("key") and not kept.is_of("another computation")
    monkeypatch.setenv("DVC_STAGE", "ppo")
    assert not kept.is_of("key")
    monkeypatch.setenv("DVC_STAGE", "sft")
    assert kept.restore(outputs) == {"loss": 0.5}
    assert kept.datasets() == {"data/clean/pretrain/train": {"digest": "1"}}
    assert sha256_tree(outputs["model"]) == before
    # In the cache of DVC a file may be the kept one; what a person edits is a copy.
    kept_weights = kept.folder / "model/a/weights"
    assert not kept_weights.samefile(outputs["model"] / "a/weights")

    (tmp_path / "dvc.lock").write_text("stages: {sft: {cmd: x}, ppo: {cmd: y}}\n")
    assert kept.is_of("key"), "another stage was recorded"
    (tmp_path / "dvc.lock").write_text("stages: {sft: {cmd: y}, ppo: {cmd: y}}\n")
    assert not kept.is_of("key"), "it is recorded: who runs the stage again wants it computed"
    kept.drop()
    assert not kept.exists()


DVC_YAML = """
stages:
  sft:
    cmd: python -m rlhf_core stage sft
    params: [sft]
    outs: [models/sft, history/sft.jsonl, metrics/sft.json]
"""
# DVC, killed where its stage is about to be saved, its outputs cached, or the lock written.
KILLED_DVC = """
import os, signal, sys
from dvc import dvcfile, stage
def die(*_, **__): os.kill(os.getpid(), signal.SIGKILL)
place = sys.argv[1]
if place == "lock": dvcfile.Lockfile.dump_stages = die
elif place: setattr(stage.Stage, place, die)
from dvc.cli import main
sys.exit(main(["repro", "--single-item", "sft"]))
"""


@pytest.mark.slow
def test_a_training_is_not_lost_when_dvc_is_killed_before_it_has_recorded_it(
    tmp_path: Path,
) -> None:
    tiny.make_workspace(tmp_path)
    shutil.rmtree(tmp_path / "models/sft")
    (tmp_path / "params.yaml").write_text(tiny.PARAMS)
    (tmp_path / "dvc.yaml").write_text(DVC_YAML)
    (tmp_path / ".dvc").mkdir()
    (tmp_path / ".dvc/config").write_text("[core]\n    no_scm = True\n    analytics = false\n")
    env = environment(RLHF_TRACKING="off", OMP_NUM_THREADS="1")
    trained, said = "", []
    for place in ("save", "commit", "lock", ""):
        command = [sys.executable, "-c", KILLED_DVC, place]
        ended = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert ended.returncode == (-signal.SIGKILL if place else 0), (place, ended.stderr)
        (tmp_path / ".dvc/tmp/rwlock").unlink(missing_ok=True)
        trained = trained or sha256_tree(tmp_path / "models/sft")
        # After the last kill DVC finds it in its own cache of runs.
        kept = "its result is taken" in ended.stderr or "is cached" in ended.stdout
        said.append(kept)
    assert said == [False, True, True, True], "it was trained once"
    assert sha256_tree(tmp_path / "models/sft") == trained
    status = [sys.executable, "-m", "dvc", "status", "--json", "sft"]
    ended = subprocess.run(status, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert ended.stdout.strip() == "{}", ended.stderr
