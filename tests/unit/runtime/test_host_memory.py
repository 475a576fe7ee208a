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


def test_without_groups_it_is_what_the_machine_has(groups: Path) -> None:
    assert 0 < host_memory.available_memory() < psutil.virtual_memory().total


# The groups that the process is in; by folder the limit, MiB held and MiB of cached files; MiB that are available.
GROUPS = {
    "cached files are free": ("0::/job/step\n", VERSION_2, {"job": ("10", 9, 2), "job/step": ("max", 9, 0)}, 3),
    "the narrowest of nested groups": (
        "5:cpu,memory:/job/step\n0::/\n", VERSION_1, {"memory/job": ("10", 9, 0), "memory/job/step": ("8", 5, 0)}, 1
    ),
    "a container's group is the top": ("0::/docker/0123\n", VERSION_2, {"": ("6", 4, 0)}, 2),
    "an overdrawn group": ("0::/\n", VERSION_2, {"": ("6", 7, 0)}, 0),
}  # fmt: skip


@pytest.mark.parametrize("case", GROUPS)
def test_limits_of_groups_count(groups: Path, case: str) -> None:
    membership, version, folders, available = GROUPS[case]
    (groups / "membership").write_text(membership)
    for name, (limit, held, cached) in folders.items():
        (groups / name).mkdir(parents=True, exist_ok=True)
        (groups / name / version.limits[0]).write_text(f"{int(limit) * MIB if limit.isdigit() else limit}\n")
        (groups / name / version.usage).write_text(f"{held * MIB}\n")
        lines = [f"{key} {cached * MIB // len(version.cached)}" for key in version.cached]
        (groups / name / "memory.stat").write_text("\n".join(["anon 1", *lines, ""]))
    assert host_memory.available_memory() == available * MIB
    if version is VERSION_2 and "" in folders:  # it is throttled at its high mark
        (groups / "memory.high").write_text(f"{folders[''][1] * MIB + 1}\n")
        assert host_memory.available_memory() == min(1, available)


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
