"""The machine of this process: cores and memory that it may use, and kernels for products."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil


def available_cores() -> int:
    """Return the number of cores that this process may use, where the system tells."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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
        cached: Keys in memory.stat of cached files, which the kernel gives back when memory is
            short.
    """

    limits: tuple[str, ...]
    usage: str
    cached: tuple[str, ...]


VERSION_1 = GroupFiles(
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
VERSION_2 = GroupFiles(
    ("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file")
)


def available_memory() -> int:
    """Return the bytes that can be taken until the machine, or a control group, is full.

    Containers, Slurm and Kubernetes limit the memory of a job by such groups. What this process has
    freed counts as available.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; musl has none
    if trim is not None:
        trim(0)
    free = [limit - held for limit, held in _control_groups()]
    return max(0, min([psutil.virtual_memory().available, *free]))


def total_memory() -> int:
    """Return the bytes that this machine has, or that a control group allows where that is less."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in _control_groups())])


def share_of_process(memory: int) -> int:
    """Return an equal part of ``memory`` for each rank on this machine.

    Where that number is unknown, all ranks count.
    """
    ranks = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or "1"
    if not ranks.isdecimal():
        return memory
    return memory // max(1, int(ranks))


def peak_above_now() -> int:
    """Return the bytes by which this process has held more memory than now.

    It is 0 where the system does not tell, and counts from the start of the process, or from the
    last call of :func:`forget_peak`.
    """
    try:
        status = STATUS.read_text(encoding="utf-8")
    except OSError:
        return 0
    sizes = dict(re.findall(r"^(VmHWM|VmRSS):\s+(\d+) kB$", status, re.MULTILINE))
    return max(0, int(sizes.get("VmHWM", "0")) - int(sizes.get("VmRSS", "0"))) * 1024


def data_size() -> int | None:
    """Return the bytes that count towards RLIMIT_DATA; None where the system does not tell."""
    try:
        status = STATUS.read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"^VmData:\s+(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def forget_peak() -> None:
    """Have :func:`peak_above_now` count from now on, where the system allows that."""
    with contextlib.suppress(OSError):
        CLEAR_REFS.write_text("5", encoding="utf-8")


def _control_groups() -> Iterator[tuple[int, int]]:
    """Yield the limits of the control groups of this process, each with what the group holds."""
    try:
        lines = MEMBERSHIP.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = [*line.split(":", 2), "", ""][:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        files, top = VERSION_2, CONTROL_GROUPS
        if controllers:
            files, top = VERSION_1, CONTROL_GROUPS / "memory"
        folder = top / name.lstrip("/")
        # A container sees the group that it is in as the top, whatever the name.
        for group in (folder, *folder.parents):
            if group.is_relative_to(top):
                yield from _limits_of(group, files)


def _limits_of(group: Path, files: GroupFiles) -> Iterator[tuple[int, int]]:
    with contextlib.suppress(OSError, ValueError):
        lines = (group / "memory.stat").read_text(encoding="utf-8").splitlines()
        statistics = dict(line.split() for line in lines)
        held = int((group / files.usage).read_text(encoding="utf-8"))
        held -= sum(int(statistics.get(key, "0")) for key in files.cached)
        for name in files.limits:
            with contextlib.suppress(OSError, ValueError):  # without a limit it says "max"
                yield int((group / name).read_text(encoding="utf-8")), held


CPUINFO = Path("/proc/cpuinfo")  # only Linux has it
# From Zen 5 on. Zen 4 computes 512 bits in two halves, with which MKL is as fast.
FULL_WIDTH_FAMILY = 26
AVX512 = frozenset({"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"})
# What OpenBLAS calls its kernels with vectors of 512 bits.
AVX512_KERNELS = ("SkylakeX", "Cooperlake", "SapphireRapids")


@cache
def is_amd_with_full_avx512() -> bool:
    """Return whether ``/proc/cpuinfo`` names one of AMD's processors with units of 512 bits."""
    fields: dict[str, str] = {}
    try:
        with CPUINFO.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if not line.strip():
                    break
                key, _, value = line.partition(":")
                fields[key.strip()] = value.strip()
    except OSError:
        return False
    family = fields.get("cpu family", "")
    if fields.get("vendor_id") != "AuthenticAMD" or not family.isdecimal():
        return False
    if int(family) < FULL_WIDTH_FAMILY:
        return False
    return set(fields.get("flags", "").split()) >= AVX512


@cache
def numpy_kernels() -> str | None:
    """Return the kernels by which OpenBLAS computes NumPy's products; None for other libraries.

    OpenBLAS takes those of the processor, or what ``OPENBLAS_CORETYPE`` named when it was loaded.
    """
    import numpy
    from threadpoolctl import threadpool_info

    built_with = numpy.show_config(mode="dicts").get("Build Dependencies", {}).get("blas", {})
    if "openblas" not in str(built_with.get("name")).lower():
        return None
    package = Path(numpy.__file__).parent
    places = {package, package.with_name("numpy.libs")}  # the latter of a wheel
    kernels = None
    for library in threadpool_info():
        if library.get("internal_api") != "openblas":
            continue
        if places & set(Path(str(library.get("filepath"))).parents):
            return str(library.get("architecture"))
        # SciPy may have loaded another copy, with kernels of its own.
        kernels = kernels or str(library.get("architecture"))
    return kernels


def set_openblas_threads(count: int) -> None:
    """Let every OpenBLAS of this process compute each product on ``count`` threads."""
    from threadpoolctl import ThreadpoolController

    ThreadpoolController().select(internal_api="openblas").limit(limits=count)
