"""Equal hashes for equal computations, and for nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from flows.dvc_repo.graph import StageNode
from flows.stage.stage_hash import stage_hash

NODE = StageNode(
    "ppo",
    after=("sft",),
    command="rlhf stage ppo",
    outputs=("models/policy",),
    inputs=("models/sft", "notes.txt"),
    params={"params.yaml": ["seed", "ppo.kl"]},
    cache="/cache",
    shareable=True,
)
LOCK = "stages:\n  sft:\n    outs:\n    - {path: models/sft, md5: aaa.dir}\n    - {path: other, md5: bbb}\n"
PARAMS = "seed: 1\nppo:\n  lr: 1e-3\n  kl: {coefficient: 0.05}\n"


def make(folder: Path) -> Path:
    folder.mkdir()
    (folder / "dvc.lock").write_text(LOCK)
    (folder / "params.yaml").write_text(PARAMS)
    (folder / "notes.txt").write_text("read this\n")
    return folder


def write(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(workspace: Path) -> None:
        text = (workspace / name).read_text()
        assert old in text
        (workspace / name).write_text(text.replace(old, new))

    return change


def test_the_place_of_the_workspace_does_not_count(tmp_path: Path) -> None:
    one, two = stage_hash(make(tmp_path / "one"), NODE), stage_hash(make(tmp_path / "two"), NODE)
    assert one == two and one is not None and len(one) == 64


@pytest.mark.parametrize(
    "change",
    [
        write("params.yaml", "lr: 1e-3", "lr: 2e-3"),  # a parameter that the stage does not read
        write("params.yaml", "0.05", "5e-2"),
        write("params.yaml", "seed: 1\n", "seed: 1  # the first\n"),
        write("dvc.lock", "bbb", "ccc"),  # the output of a stage that it does not read
    ],
)
def test_what_the_stage_does_not_read_does_not_count(tmp_path: Path, change: Callable[[Path], None]) -> None:
    before = stage_hash(make(tmp_path / "w"), NODE)
    change(tmp_path / "w")
    assert stage_hash(tmp_path / "w", NODE) == before


@pytest.mark.parametrize(
    "change",
    [
        write("params.yaml", "seed: 1", "seed: 2"),
        write("params.yaml", "0.05", "0.06"),
        write("dvc.lock", "aaa.dir", "ddd.dir"),
        write("notes.txt", "read this", "read that"),
    ],
)
def test_what_the_stage_reads_counts(tmp_path: Path, change: Callable[[Path], None]) -> None:
    before = stage_hash(make(tmp_path / "w"), NODE)
    change(tmp_path / "w")
    assert stage_hash(tmp_path / "w", NODE) not in (before, None)


@pytest.mark.parametrize("other", [{"command": "rlhf stage ppo --x"}, {"cache": "/elsewhere"}, {"outputs": ("m",)}])
def test_command_outputs_and_cache_count(tmp_path: Path, other: dict[str, object]) -> None:
    workspace = make(tmp_path / "w")
    assert stage_hash(workspace, replace(NODE, **other)) != stage_hash(workspace, NODE)  # type: ignore[arg-type]


def test_nothing_is_shared_when_an_input_is_missing_or_the_run_cache_does_not_take_the_stage(tmp_path: Path) -> None:
    workspace = make(tmp_path / "w")
    assert stage_hash(workspace, replace(NODE, shareable=False)) is None
    (workspace / "notes.txt").unlink()
    assert stage_hash(workspace, NODE) is None


def test_a_lock_file_that_is_being_written_is_no_error(tmp_path: Path) -> None:
    workspace = make(tmp_path / "w")
    (workspace / "dvc.lock").write_text("stages: {sft: [")
    assert stage_hash(workspace, NODE) is None
