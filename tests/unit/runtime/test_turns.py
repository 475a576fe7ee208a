"""Ranks of one machine take turns to load; whatever lies in the lock's place, they load."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from rlhf_core.runtime.distributed import one_of_machine_at_a_time


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file by which two ranks of this machine take turns."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / f"rlhf-{os.getuid()}" / f"turn-{os.getppid()}"


def is_free(lock: Path) -> bool:
    with lock.open() as other:
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_one_rank_at_a_time(lock: Path) -> None:
    with one_of_machine_at_a_time():
        assert not is_free(lock)
    assert is_free(lock)


def test_a_failure_ends_the_turn(lock: Path) -> None:
    with pytest.raises(MemoryError), one_of_machine_at_a_time():
        raise MemoryError
    assert is_free(lock)


def test_a_lone_process_makes_no_file(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with one_of_machine_at_a_time():
        assert not lock.exists()


@pytest.mark.parametrize("planted", ["link", "dangling link", "folder", "open folder", "no folder"])
def test_what_others_put_in_its_place_is_left_alone(
    planted: str, lock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "of another user"
    lock.parent.mkdir(mode=0o700)
    if planted == "link":
        target.write_text("as it was")
    if planted in ("link", "dangling link"):
        lock.symlink_to(target)
    elif planted == "folder":
        lock.mkdir()
    elif planted == "open folder":
        lock.parent.chmod(0o777)
    else:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    entered = False
    with one_of_machine_at_a_time():
        entered = True
    assert entered and target.exists() == (planted == "link")
    assert planted != "link" or target.read_text() == "as it was"
