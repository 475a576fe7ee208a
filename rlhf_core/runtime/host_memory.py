"""Memory of the machine that this process may still take."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import psutil

CONTROL_GROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
STATUS = Path("/proc/self/status")

# Of version 2 and version 1: the limit, what is held, and the key of cached files that the kernel gives back, in
# memory.stat.
VERSIONS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_memory() -> int:
    """Bytes that can be taken until the machine, or a control group with a limit that the process is in, is full.

    Containers, Slurm and Kubernetes limit the memory of a job by such groups.
    """
    return max(0, min([psutil.virtual_memory().available, *_free_in_control_groups()]))


def share_of_process(memory: int) -> int:
    """An equal part of ``memory`` for each rank on this machine."""
    return memory // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def peak_above_now() -> int:
    """Bytes by which this process has at some time held more memory than now; 0 where the system does not tell."""
    try:
        sizes = dict(re.findall(r"^(VmHWM|VmRSS):\s+(\d+) kB$", STATUS.read_text(encoding="utf-8"), re.MULTILINE))
    except OSError:
        return 0
    return max(0, int(sizes.get("VmHWM", "0")) - int(sizes.get("VmRSS", "0"))) * 1024


def _free_in_control_groups() -> Iterator[int]:
    try:
        lines = MEMBERSHIP.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            top = CONTROL_GROUPS / ("memory" if controllers else "")
            folder = top / name.lstrip("/")
            # A container sees the group that it is in as the top, whatever the name.
            for group in (folder, *folder.parents):
                if group.is_relative_to(top):
                    yield from _free_in(group)


def _free_in(group: Path) -> Iterator[int]:
    for limit, held, cached in VERSIONS:
        try:
            most = (group / limit).read_text(encoding="utf-8").strip()
            if most == "max":
                return
            statistics = dict(line.split() for line in (group / "memory.stat").read_text(encoding="utf-8").splitlines())
            yield int(most) - int((group / held).read_text(encoding="utf-8")) + int(statistics.get(cached, "0"))
        except (OSError, ValueError):
            continue
