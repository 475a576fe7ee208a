"""How much memory a process may still take: of the machine, and of the control groups that it is in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rlhf_core.runtime import machine as host_memory
from rlhf_core.runtime.machine import VERSION_1, VERSION_2

MIB = 2**20


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty tree of control groups, of which the process is in none."""
    monkeypatch.setattr(host_memory, "CONTROL_GROUPS", tmp_path)
    monkeypatch.setattr(host_memory, "MEMBERSHIP", tmp_path / "membership")
    (tmp_path / "membership").write_text("3:cpuset:/\n")
    return tmp_path


def group(folder: Path, version: host_memory.GroupFiles, limit: str, held: int, cached: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / version.limits[0]).write_text(limit + "\n")
    (folder / version.usage).write_text(f"{held}\n")
    lines = [f"{key} {cached // len(version.cached)}" for key in version.cached]
    (folder / "memory.stat").write_text("\n".join(["anon 1", *lines, ""]))


def test_without_groups_it_is_what_the_machine_has(groups: Path) -> None:
    before = psutil.virtual_memory().total
    assert 0 < host_memory.available_memory() < before


def test_a_group_of_version_2_counts_cached_files_as_free(groups: Path) -> None:
    (groups / "membership").write_text("0::/job/step\n")
    group(groups / "job", VERSION_2, str(10 * MIB), held=9 * MIB, cached=2 * MIB)
    group(groups / "job/step", VERSION_2, "max", held=9 * MIB, cached=0)
    assert host_memory.available_memory() == 3 * MIB


def test_the_narrowest_of_nested_groups_counts(groups: Path) -> None:
    (groups / "membership").write_text("5:cpu,memory:/job/step\n0::/\n")
    group(groups / "memory/job", VERSION_1, str(10 * MIB), held=9 * MIB, cached=0)
    group(groups / "memory/job/step", VERSION_1, str(8 * MIB), held=5 * MIB, cached=0)
    assert host_memory.available_memory() == MIB


def test_a_container_sees_its_group_as_the_top(groups: Path) -> None:
    (groups / "membership").write_text("0::/docker/0123\n")
    group(groups, VERSION_2, str(6 * MIB), held=4 * MIB, cached=0)
    assert host_memory.available_memory() == 2 * MIB


def test_an_overdrawn_group_has_nothing_left(groups: Path) -> None:
    (groups / "membership").write_text("0::/\n")
    group(groups, VERSION_2, str(6 * MIB), held=7 * MIB, cached=0)
    assert host_memory.available_memory() == 0


def test_a_group_is_throttled_at_its_high_mark(groups: Path) -> None:
    (groups / "membership").write_text("0::/\n")
    group(groups, VERSION_2, "max", held=4 * MIB, cached=0)
    (groups / "memory.high").write_text(f"{5 * MIB}\n")
    assert host_memory.available_memory() == MIB


@pytest.mark.parametrize("membership", [b"0::/caf\xe9\n", b"nonsense\n", b"", b"0::/absent\n", b"1:memory:/../x\n"])
def test_a_membership_that_tells_nothing_limits_nothing(groups: Path, membership: bytes) -> None:
    (groups / "membership").write_bytes(membership)
    assert host_memory.available_memory() > 8 * MIB


@pytest.mark.parametrize(
    ("ranks", "share"),
    [
        ({}, 9),
        ({"LOCAL_WORLD_SIZE": "4"}, 2),
        ({"WORLD_SIZE": "3"}, 3),
        ({"LOCAL_WORLD_SIZE": "", "WORLD_SIZE": "3"}, 3),
        ({"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "3"}, 4),
        ({"LOCAL_WORLD_SIZE": "0"}, 9),
        ({"LOCAL_WORLD_SIZE": "x"}, 9),
    ],
)
def test_ranks_of_a_machine_share(monkeypatch: pytest.MonkeyPatch, ranks: dict[str, str], share: int) -> None:
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    assert host_memory.share_of_process(9) == share


@pytest.mark.skipif(not host_memory.STATUS.exists(), reason="only Linux tells the peak of a process")
def test_memory_that_was_given_back_is_part_of_the_peak_until_that_is_forgotten() -> None:
    program = (
        "from rlhf_core.runtime.machine import forget_peak, peak_above_now\n"
        "before = peak_above_now()\n"
        "block = bytearray(200 * 2**20)\n"
        "held = peak_above_now()\n"
        "del block\n"
        "print(before, held, peak_above_now())\n"
        "forget_peak()\n"
        "print(peak_above_now())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    before, held, after, forgotten = map(int, done.stdout.split())
    assert held <= before + 8 * MIB and 190 * MIB < after < 220 * MIB and forgotten < 8 * MIB
