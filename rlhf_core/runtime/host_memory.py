"""Memory of the machine that this process may still take."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

CONTROL_GROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class GroupFiles:
    """Where one version of Linux's control groups says what a group holds.

    Attributes:
        limits: Files with what it may hold at most.
        usage: The file with what it holds.
        cached: Keys in memory.stat of cached files, which the kernel gives back when memory is short.
    """

    limits: tuple[str, ...]
    usage: str
    cached: tuple[str, ...]


VERSION_1 = GroupFiles(
    ("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
)
VERSION_2 = GroupFiles(("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file"))


def available_memory() -> int:
    """Bytes that can be taken until the machine, or a control group with a limit that the process is in, is full.

    Containers, Slurm and Kubernetes limit the memory of a job by such groups. What this process has freed counts as
    available.
    """
    _return_freed()
    return max(0, min([psutil.virtual_memory().available, *_free_in_control_groups()]))


def share_of_process(memory: int) -> int:
    """An equal part of ``memory`` for each rank on this machine, or for each of all ranks if that number is unknown."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or "1"
    return memory // max(1, int(ranks) if ranks.isdecimal() else 1)


def peak_above_now() -> int:
    """Bytes by which this process has held more memory than now; 0 where the system does not tell.

    It counts from the start of the process, or from the last call of :func:`forget_peak`.
    """
    try:
        sizes = dict(re.findall(r"^(VmHWM|VmRSS):\s+(\d+) kB$", STATUS.read_text(encoding="utf-8"), re.MULTILINE))
    except OSError:
        return 0
    return max(0, int(sizes.get("VmHWM", "0")) - int(sizes.get("VmRSS", "0"))) * 1024


def data_size() -> int | None:
    """Bytes that count towards a limit of this process's data (RLIMIT_DATA); None where the system does not tell."""
    try:
        found = re.search(r"^VmData:\s+(\d+) kB$", STATUS.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def forget_peak() -> None:
    """Have :func:`peak_above_now` count from now on, where the system allows that."""
    with contextlib.suppress(OSError):
        CLEAR_REFS.write_text("5", encoding="utf-8")


def _return_freed() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; musl has none
    if trim is not None:
        trim(0)


def _free_in_control_groups() -> Iterator[int]:
    try:
        lines = MEMBERSHIP.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = [*line.split(":", 2), "", ""][:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        files, top = (VERSION_1, CONTROL_GROUPS / "memory") if controllers else (VERSION_2, CONTROL_GROUPS)
        folder = top / name.lstrip("/")
        # A container sees the group that it is in as the top, whatever the name.
        for group in (folder, *folder.parents):
            if group.is_relative_to(top):
                yield from _free_in(group, files)


def _free_in(group: Path, files: GroupFiles) -> Iterator[int]:
    with contextlib.suppress(OSError, ValueError):
        statistics = dict(line.split() for line in (group / "memory.stat").read_text(encoding="utf-8").splitlines())
        held = int((group / files.usage).read_text(encoding="utf-8"))
        held -= sum(int(statistics.get(key, "0")) for key in files.cached)
        for name in files.limits:
            with contextlib.suppress(OSError, ValueError):  # without a limit it says "max"
                yield int((group / name).read_text(encoding="utf-8")) - held
