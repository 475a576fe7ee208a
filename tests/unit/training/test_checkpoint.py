"""Checkpoints: whole or absent, verified, the newest sound one wins. And random state."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from rlhf_core.errors import CheckpointError
from rlhf_core.runtime import distributed
from rlhf_core.training.checkpoints.checkpoint import Piece, load_latest
from rlhf_core.training.checkpoints.manager import CheckpointManager
from rlhf_core.training.rng import derive_seed, rng_state, seed_everything, set_rng_state


def saved(folder: Path, *steps: int, keep: int = 3) -> Path:
    with CheckpointManager(folder) as manager:
        for step in steps:
            manager.save(step, {"w": Piece.whole(torch.full((2,), float(step)))}, {"beta": 0.1 * step}, keep)
    return folder


def test_round_trip_and_retention(tmp_path: Path) -> None:
    folder = saved(tmp_path, 5, 10, 15, keep=2)
    assert sorted(path.name for path in folder.iterdir()) == ["step-000010", "step-000015"]
    found = load_latest(folder)
    assert found is not None and found.step == 15
    assert found.tensors.whole("w").tolist() == [15.0, 15.0] and found.meta == {"beta": 0.1 * 15}


def test_none_where_there_is_nothing(tmp_path: Path) -> None:
    assert load_latest(tmp_path / "absent") is None
    (tmp_path / ".building-000003").mkdir()
    assert load_latest(tmp_path) is None


@pytest.mark.parametrize("damage", ["flip", "truncate", "no manifest", "no state", "half a manifest"])
def test_a_broken_newest_falls_back_loudly(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    newest = saved(tmp_path, 1, 2) / "step-000002"
    state, manifest = newest / "state-00001-of-00001.safetensors", newest / "manifest.json"
    content = state.read_bytes()
    match damage:
        case "flip":
            state.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        case "truncate":
            state.write_bytes(content[:-3])
        case "no manifest":
            manifest.unlink()
        case "no state":
            state.unlink()
        case _:
            manifest.write_text(manifest.read_text()[:20])
    found = load_latest(tmp_path)
    assert found is not None and found.step == 1
    assert "step-000002" in caplog.text and "falling back" in caplog.text
    # Moved aside, so that it never counts as one of those to keep.
    saved(tmp_path, 2, keep=2)
    assert load_latest(tmp_path).step == 2  # type: ignore[union-attr]


def test_all_broken_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    for path in saved(tmp_path, 1, 2).glob("step-*"):
        (path / "meta.json").write_text("{}")
    with pytest.raises(CheckpointError, match="delete the folder to start over"):
        load_latest(tmp_path)


def test_later_checkpoints_of_an_abandoned_run_go(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20, 30)
    saved(tmp_path, 15)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000010", "step-000015"]


def test_leftovers_of_a_killed_save_do_no_harm(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    shutil.copytree(tmp_path / "step-000001", tmp_path / ".building-000007")
    saved(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000002"]


def test_random_state_restores_all_three_generators() -> None:
    def draws() -> tuple[float, float, float, float]:
        return random.random(), random.gauss(0, 1), float(np.random.normal()), float(torch.rand(()))

    tensors, meta = rng_state()
    try:
        seed_everything(3)
        random.gauss(0, 1)  # leaves a second value waiting
        np.random.normal()
        inside = rng_state()
        expected = [draws(), draws()]
        set_rng_state(*inside)
        assert [draws(), draws()] == expected
    finally:
        set_rng_state(tensors, meta)


def test_each_rank_restores_the_generator_of_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    generators = [torch.tensor([rank], dtype=torch.uint8) for rank in range(3)]
    now = [0]
    monkeypatch.setattr(distributed, "device", lambda: torch.device("cuda", now[0]))
    monkeypatch.setattr(distributed, "rank", lambda: now[0])
    monkeypatch.setattr(distributed, "is_rank_zero", lambda: now[0] == 0)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: generators[device.index])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: restored.append((device.index, int(state))))
    restored: list[tuple[int, int]] = []
    stored, meta = rng_state()
    assert {"rng.python", "rng.numpy", "rng.torch", "rng.cuda.0"} == stored.keys()
    now[0] = 1
    assert list(rng_state()[0]) == ["rng.cuda.1"]
    stored |= rng_state()[0]
    for now[0] in range(3):
        set_rng_state(stored, meta)
    assert restored == [(0, 0), (1, 1)], "the third rank is a new one"


def test_streams_differ_and_stay_in_range() -> None:
    seeds = {derive_seed(seed, name) for seed in range(50) for name in ("sft", "reward", "referee")}
    assert len(seeds) == 150 and all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(1, "a", "b") != derive_seed(1, "ab")
