"""Checkpoints: whole or absent, verified, written while training goes on, by one rank and several.
And random state.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import threading
from collections.abc import Iterator, Mapping
from concurrent import futures
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import exit_code_of, run_ranks
from safetensors.torch import load_file

from rlhf_core.errors import CheckpointError
from rlhf_core.runtime import distributed
from rlhf_core.runtime import machine as host_memory
from rlhf_core.training.checkpoints import checkpoint, consolidate
from rlhf_core.training.checkpoints import manager as module
from rlhf_core.training.checkpoints.checkpoint import (
    HostCopies,
    Piece,
    SavedTensors,
    load_latest,
    pieces_of_rank,
    verified,
    write_pieces,
)
from rlhf_core.training.checkpoints.manager import CheckpointManager
from rlhf_core.training.rng import derive_seed, rng_state, seed_everything, set_rng_state


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def full(path: Path, pieces: Mapping[str, Piece]) -> None:
    """What writing pieces does where the disk is full."""
    raise OSError(28, "No space left on device")


class Gate:
    """Lets files of pieces be written only when it is open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        monkeypatch.setattr(module, "write_pieces", self._write)

    def _write(self, path: Path, pieces: Mapping[str, Piece]) -> None:
        assert self.opened.wait(60)
        write_pieces(path, pieces)


def test_training_goes_on_while_a_copy_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, weight, findings = Gate(monkeypatch), torch.ones(3), ["first"]
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"w": Piece.whole(weight)}, {"findings": findings}, keep=2)
        weight += 1
        findings.append("second")
        manager.check()
        assert names(tmp_path) in ([], [".building-000001"])
        assert manager.metas() == {1: {"findings": ["first"]}}
        gate.opened.set()
    saved = load_latest(tmp_path)
    assert saved is not None and saved.tensors.whole("w").tolist() == [1.0, 1.0, 1.0]
    assert saved.meta == {"findings": ["first"]}


def test_a_second_checkpoint_leaves_the_first_copy_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"w": Piece.whole(torch.ones(3))}, {}, keep=2)
        opening = threading.Timer(0.2, gate.opened.set)
        opening.start()
        manager.save(2, {"w": Piece.whole(torch.zeros(3))}, {}, keep=2)
    values = [
        load_file(next(tmp_path.glob(f"step-00000{step}/*.safetensors")))["w"].tolist()
        for step in (1, 2)
    ]
    assert values == [[1.0] * 3, [0.0] * 3]


def test_what_will_go_does_not_count_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, {"w": Piece.whole(torch.ones(1))}, {"n": step}, keep=2)
        manager.finish()
        gate = Gate(monkeypatch)
        manager.save(3, {"w": Piece.whole(torch.ones(1))}, {"n": 3}, keep=2)
        assert manager.metas() == {2: {"n": 2}, 3: {"n": 3}}
        assert "step-000001" in names(tmp_path)  # until the third is whole
        gate.opened.set()
        manager.finish()
        assert manager.metas() == {2: {"n": 2}, 3: {"n": 3}} and names(tmp_path) == [
            "step-000002",
            "step-000003",
        ]


@pytest.mark.parametrize(
    ("available", "waited_for"),
    [(0, {"v", "w"}), (8, {"v"}), (12, set())],
    ids=["none", "one of two", "all"],
)
def test_what_memory_has_no_room_for_is_written_before_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, available: float, waited_for: set[str]
) -> None:
    """Room for the copies of as many bytes, of which each of two tensors has some."""
    monkeypatch.setattr(HostCopies, "_room", lambda self: available)
    written: list[set[str]] = []

    def write(path: Path, pieces: Mapping[str, Piece]) -> None:
        written.append(set(pieces))
        write_pieces(path, pieces)

    monkeypatch.setattr(module, "write_pieces", write)
    tensors = {"w": torch.ones(2), "v": torch.full((1,), 3.0)}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {name: Piece.whole(tensor) for name, tensor in tensors.items()}, {}, keep=2)
        assert written[:1] == ([waited_for] if waited_for else written[:1])
        for tensor in tensors.values():
            tensor += 1
    saved = load_latest(tmp_path)
    assert saved is not None and set.union(*written) == {"w", "v"} == saved.tensors.names
    assert saved.tensors.whole("w").tolist() == [1.0, 1.0] and saved.tensors.whole(
        "v"
    ).tolist() == [3.0]
    copied = 2 - len(waited_for)
    assert len(list((tmp_path / "step-000001").glob("*.safetensors"))) == (2 if copied == 1 else 1)


def test_an_interrupt_while_training_waits_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostCopies, "_room", lambda self: 0)
    waited_for: list[Any] = []

    def interrupted(path: Path, pieces: Mapping[str, Piece]) -> None:
        raise KeyboardInterrupt

    def wait(jobs: list[Any], timeout: float | None) -> Any:
        waited_for.extend(jobs)
        return futures.wait(jobs, timeout)

    monkeypatch.setattr(module, "write_pieces", interrupted)
    monkeypatch.setattr(module, "wait", wait)
    with pytest.raises(KeyboardInterrupt), CheckpointManager(tmp_path) as manager:
        manager.save(1, {"w": Piece.whole(torch.ones(1))}, {}, keep=2)
    assert waited_for == []


def save_a_file_that_may_not_grow(folder: Path) -> None:
    with CheckpointManager(folder) as manager:
        manager.save(1, {"w": Piece.whole(torch.ones(10))}, {}, keep=2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    refused = pytest.raises(
        CheckpointError, match=r"^[^\n]*step 2 could not .*File too large.* goes on from step 1$"
    )
    with refused, CheckpointManager(folder) as manager:
        manager.save(2, {"w": Piece.whole(torch.ones(10000))}, {}, keep=2)


def test_a_file_that_may_not_grow_ends_the_run_and_keeps_the_last_checkpoint(
    tmp_path: Path,
) -> None:
    assert exit_code_of(save_a_file_that_may_not_grow, tmp_path) == 0
    assert names(tmp_path) == ["step-000001"] and load_latest(tmp_path).step == 1  # type: ignore[union-attr]


@pytest.mark.parametrize("room", [0, 100])
def test_an_error_surfaces_at_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    monkeypatch.setattr(HostCopies, "_room", lambda self: room)
    monkeypatch.setattr(module, "write_pieces", full)
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"w": Piece.whole(torch.ones(1))}, {}, keep=2)
    with pytest.raises(
        CheckpointError, match=r"step 1 .*no space left on the device; make room .*it starts over"
    ):
        manager.finish()
    manager.check()  # it is told once
    assert names(tmp_path) == []


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_run_that_fails_still_leaves_its_last_checkpoint(
    tmp_path: Path, error: type[BaseException]
) -> None:
    with pytest.raises(error), CheckpointManager(tmp_path) as manager:
        manager.save(1, {"w": Piece.whole(torch.ones(1))}, {}, keep=2)
        raise error
    assert names(tmp_path) == ["step-000001"]


def test_files_that_a_checkpoint_relies_on_are_written_before_it(tmp_path: Path) -> None:
    order: list[list[str]] = []
    with CheckpointManager(tmp_path) as manager:
        manager.attach(lambda: order.append(names(tmp_path)))
        manager.save(1, {"w": Piece.whole(torch.ones(1))}, {}, keep=2)
        manager.attach(lambda: order.append(names(tmp_path)))
        manager.save(2, {"w": Piece.whole(torch.ones(1))}, {}, keep=2)
    assert order == [[], ["step-000001"]]


def test_a_checkpoint_without_the_files_it_relies_on_does_not_count(tmp_path: Path) -> None:
    ran: list[int] = []

    def fail() -> None:
        raise OSError("the disk is gone")

    manager = CheckpointManager(tmp_path)
    manager.attach(fail)
    manager.save(1, {"w": Piece.whole(torch.ones(1))}, {}, keep=2)
    manager.attach(lambda: ran.append(1))  # might delete what an older checkpoint needs
    with pytest.raises(CheckpointError, match=r"step 1 .*the disk is gone"):
        manager.finish()
    with CheckpointManager(tmp_path / "other") as other:
        other.save(1, {"w": Piece.whole(torch.ones(1))}, {}, keep=2)
    assert names(tmp_path) == ["other"] and ran == []


def test_pieces_are_put_together(tmp_path: Path) -> None:
    matrix = torch.arange(12.0).view(3, 4)
    flat = matrix.flatten()
    write_pieces(
        tmp_path / "a.safetensors",
        {"m": Piece.flat(flat[:5].clone(), (3, 4), 0), "x": Piece.whole(flat)},
    )
    write_pieces(tmp_path / "b.safetensors", {"m": Piece.flat(flat[5:].clone(), (3, 4), 5)})
    saved = SavedTensors([tmp_path / "b.safetensors", tmp_path / "a.safetensors"])
    assert saved.names == {"m", "x"} and torch.equal(saved.whole("m"), matrix)
    assert saved.read("m", 3, 8).tolist() == [3.0, 4.0, 5.0, 6.0, 7.0]
    assert saved.read("x", 2, 3).tolist() == [2.0]
    with pytest.raises(CheckpointError, match="elements 5 to 12 of m are missing"):
        SavedTensors([tmp_path / "a.safetensors"]).whole("m")


TENSORS = {
    "weight": torch.arange(15.0).view(3, 5),
    "step": torch.tensor(4.0),
    "bias": torch.arange(2.0),
}


def on_ranks(folder: Path) -> None:
    """Checkpoints of tensors that all ranks hold, and what becomes of faults of one rank."""
    # Only the folder of rank 0 counts.
    manager = CheckpointManager(folder / f"of-{distributed.rank()}")
    for step in (1, 2, 3):
        if distributed.rank() == 1:
            # Of the second checkpoint this rank copies what has at most four bytes.
            HostCopies._room = lambda self, step=step: 4 if step == 2 else 100  # type: ignore[method-assign,misc]
        tensors = {name: tensor + step for name, tensor in TENSORS.items()}
        manager.save(step, pieces_of_rank(tensors), {"rank": distributed.rank()}, keep=3)
    manager.finish()
    if distributed.is_rank_zero():
        shutil.copytree(manager.directory, folder / "sound")
        damaged = manager.directory / "step-000003/state-00002-of-00002.safetensors"
        damaged.write_bytes(damaged.read_bytes()[:-1])
    distributed.any_rank(False)
    newest = manager.load_latest()
    assert newest is not None and newest.step == 2 and newest.meta == {"rank": 0}
    assert all(
        torch.equal(newest.tensors.whole(name), tensor + 2) for name, tensor in TENSORS.items()
    )

    if distributed.rank() == 1:
        module.write_pieces = full  # type: ignore[assignment]
    manager.save(4, pieces_of_rank(TENSORS), {}, keep=3)
    try:
        manager.finish()
        message = ""
    except CheckpointError as error:
        message = str(error)
    left: list[Any] = names(manager.directory)
    (folder / f"failure-{distributed.rank()}.json").write_text(json.dumps([message, left]))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("manager") / "2"
    run_ranks(on_ranks, 2, folder)
    return folder


def test_a_rank_without_room_writes_two_files(two: Path) -> None:
    files = [
        f"state-0000{rank}-of-00002{rest}.safetensors"
        for rank, rest in ((1, ""), (2, ""), (2, "-1"))
    ]
    step = two / "sound/step-000002"
    assert names(step) == ["manifest.json", "meta.json", *sorted(files)]
    saved = verified(step)
    assert all(
        torch.equal(saved.tensors.whole(name), tensor + 2) for name, tensor in TENSORS.items()
    )


def test_each_of_two_ranks_writes_half_and_one_process_reads_all(two: Path) -> None:
    step = two / "sound/step-000003"
    files = [f"state-0000{rank}-of-00002.safetensors" for rank in (1, 2)]
    assert names(step) == ["manifest.json", "meta.json", *files]
    assert set(json.loads((step / "manifest.json").read_text())) == {"meta.json", *files}
    sizes = [sum(tensor.numel() for tensor in load_file(step / file).values()) for file in files]
    assert sizes == [8, 10] and not (two / "of-1").exists()
    saved = load_latest(two / "sound")
    assert saved is not None and saved.step == 3
    assert all(
        torch.equal(saved.tensors.whole(name), tensor + 3) for name, tensor in TENSORS.items()
    )


def test_a_checkpoint_can_be_put_into_one_file(
    two: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "whole.safetensors"
    assert consolidate.main([str(two / "sound/step-000003"), str(target)]) == 0
    whole = load_file(target)
    assert whole.keys() == TENSORS.keys()
    assert all(torch.equal(whole[name], tensor + 3) for name, tensor in TENSORS.items())
    assert names(tmp_path) == ["whole.safetensors"]
    assert consolidate.main([str(two), str(target)]) == 2
    assert "manifest.json" in capsys.readouterr().err


def test_torch_reads_the_files_too(two: Path) -> None:
    weight = torch.zeros(15)  # torch knows pieces that are boxes: a flat one is of a flat tensor
    reader = dcp.HuggingFaceStorageReader(str(two / "sound/step-000003"))
    dcp.load({"weight": weight}, storage_reader=reader, no_dist=True)
    assert torch.equal(weight.view(3, 5), TENSORS["weight"] + 3)


def test_a_fault_of_one_rank_is_an_error_of_all(two: Path) -> None:
    first, second = (json.loads((two / f"failure-{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert "step 4 could not be written" in first[0] and "goes on from step 2" in first[0]
    assert first[1] == ["broken-step-000003", "step-000001", "step-000002"]


def whole(**tensors: torch.Tensor) -> dict[str, Piece]:
    return {name: Piece.whole(tensor) for name, tensor in tensors.items()}


def test_what_training_takes_between_checkpoints_is_left_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1,000 bytes are available, of which a tenth stays free. Peaks before three checkpoints: 300,
    700, 1,100.

    With copies of 600 bytes, 700 and 1,100 mean that training took 100 and 500.
    """
    peaks: Iterator[int] = iter([300, 700, 1100])
    monkeypatch.setattr(host_memory, "available_memory", lambda: 1000)
    monkeypatch.setattr(host_memory, "peak_above_now", lambda: next(peaks))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    copies, state = HostCopies(), whole(w=torch.ones(100), v=torch.ones(50))
    copied = [sorted(copies.copy(state)[0]) for _ in range(3)]
    assert copied == [["v", "w"], ["v", "w"], ["w"]]  # 600 bytes are just enough, 400 are not
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(host_memory, "peak_above_now", lambda: 0)
    assert copies.copy(state)[0] == {}  # 450 - 500


def test_memory_that_is_refused_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: torch.Tensor, **options: object) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch.Tensor, "clone", refused)
    copied, uncopied = HostCopies().copy(whole(w=torch.ones(2)))
    assert copied == {} and [list(group) for group in uncopied] == [["w"]]
    assert checkpoint.bytes_of(uncopied[0]["w"]) == 8


def test_pieces_that_must_be_copied_to_be_written_are_in_small_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checkpoint, "STREAM_BYTES", 40)
    monkeypatch.setattr(HostCopies, "_room", lambda self: -1)
    transposed = torch.ones(2, 2).t()  # 16 bytes each
    state = whole(
        a=transposed,
        b=torch.ones(100),
        c=transposed,
        d=transposed,
        e=torch.ones(3),
        f=torch.ones(6, 7).t(),
    )
    _, uncopied = HostCopies().copy(state)
    assert [list(group) for group in uncopied] == [["a", "b", "c"], ["d", "e"], ["f"]]


def test_an_empty_tensor_needs_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostCopies, "_room", lambda self: -1)
    assert list(HostCopies().copy(whole(empty=torch.ones(0)))[0]) == ["empty"]


def saved(folder: Path, *steps: int, keep: int = 3) -> Path:
    with CheckpointManager(folder) as manager:
        for step in steps:
            manager.save(
                step, {"w": Piece.whole(torch.full((2,), float(step)))}, {"beta": 0.1 * step}, keep
            )
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


@pytest.mark.parametrize(
    "damage", ["flip", "truncate", "no manifest", "no state", "half a manifest"]
)
def test_a_broken_newest_falls_back_loudly(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
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
    monkeypatch.setattr(
        torch.cuda,
        "set_rng_state",
        lambda state, device: restored.append((device.index, int(state))),
    )
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
