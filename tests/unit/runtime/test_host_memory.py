"""How much memory a process may still take: of the machine, and of the control groups that it is in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rlhf_core.runtime import host_memory

MIB = 2**20


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty tree of control groups, of which the process is in none."""
    monkeypatch.setattr(host_memory, "CONTROL_GROUPS", tmp_path)
    monkeypatch.setattr(host_memory, "MEMBERSHIP", tmp_path / "membership")
    (tmp_path / "membership").write_text("3:cpuset:/\n")
    return tmp_path


def group(folder: Path, version: int, limit: str, held: int, cached: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    most, now, key = host_memory.VERSIONS[2 - version]
    (folder / most).write_text(limit + "\n")
    (folder / now).write_text(f"{held}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{key} {cached}\n")


def test_without_groups_it_is_what_the_machine_has(groups: Path) -> None:
    before = psutil.virtual_memory().total
    assert 0 < host_memory.available_memory() < before


def test_a_group_of_version_2_counts_cached_files_as_free(groups: Path) -> None:
    (groups / "membership").write_text("0::/job/step\n")
    group(groups / "job", 2, str(10 * MIB), held=9 * MIB, cached=3 * MIB)
    group(groups / "job/step", 2, "max", held=9 * MIB, cached=0)
    assert host_memory.available_memory() == 4 * MIB


def test_the_narrowest_of_nested_groups_counts(groups: Path) -> None:
    (groups / "membership").write_text("5:cpu,memory:/job/step\n0::/\n")
    group(groups / "memory/job", 1, str(10 * MIB), held=9 * MIB, cached=0)
    group(groups / "memory/job/step", 1, str(8 * MIB), held=5 * MIB, cached=0)
    assert host_memory.available_memory() == MIB


def test_a_container_sees_its_group_as_the_top(groups: Path) -> None:
    (groups / "membership").write_text("0::/docker/0123\n")
    group(groups, 2, str(6 * MIB), held=4 * MIB, cached=0)
    assert host_memory.available_memory() == 2 * MIB


def test_an_overdrawn_group_has_nothing_left(groups: Path) -> None:
    (groups / "membership").write_text("0::/\n")
    group(groups, 2, str(6 * MIB), held=7 * MIB, cached=0)
    assert host_memory.available_memory() == 0


def test_ranks_of_a_machine_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert host_memory.share_of_process(9) == 2
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert host_memory.share_of_process(9) == 9


@pytest.mark.skipif(not host_memory.STATUS.exists(), reason="only Linux tells the peak of a process")
def test_memory_that_was_given_back_is_part_of_the_peak() -> None:
    program = (
        "from rlhf_core.runtime.host_memory import peak_above_now\n"
        "before = peak_above_now()\n"
        "block = bytearray(200 * 2**20)\n"
        "held = peak_above_now()\n"
        "del block\n"
        "print(before, held, peak_above_now())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    before, held, after = map(int, done.stdout.split())
    assert held <= before + 8 * MIB and 190 * MIB < after < 220 * MIB
