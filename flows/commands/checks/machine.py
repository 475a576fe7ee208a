"""Python, packages, programs, processors and memory."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
from collections.abc import Iterator

from flows.commands.checks import FAIL, OK, WARN, DoctorCheck
from rlhf_core.runtime.openblas import AVX512_KERNELS, is_amd_with_full_avx512, numpy_kernels

SUPPORTED = ((3, 11), (3, 13))
REINSTALL = "install the pinned requirements.lock again (`make setup`)"
# Requirement, and what breaks outside it. Newer versions of the first two break servers although `pip check` is clean.
REQUIREMENTS = (
    ("fastapi>=0.139,<0.151", "newer ones refuse requests of the Prefect client, or keep its server from starting"),
    ("sqlalchemy>=2.0,<2.1", "with 2.1 scheduled runs are never created, and only a log says so"),
    ("torch>=2.6", ""),
    ("transformers>=5.0", ""),
    ("prefect>=3.4", ""),
    ("dvc>=3.60", ""),
    ("mlflow>=3.0", ""),
    ("great-expectations>=1.3", ""),
)


def machine_checks() -> Iterator[DoctorCheck]:
    """Check what does not depend on a workspace."""
    yield _python()
    for requirement, consequence in REQUIREMENTS:
        yield check_package(requirement, consequence)
    yield _git()
    yield from _processors()
    yield from _products()
    yield _memory()


def _python() -> DoctorCheck:
    version = sys.version_info[:2]
    text = f"Python {sys.version.split()[0]}"
    if SUPPORTED[0] <= version <= SUPPORTED[1]:
        return DoctorCheck(OK, "python", text)
    return DoctorCheck(FAIL, "python", text, "use Python 3.11, 3.12 or 3.13")


def check_package(requirement: str, consequence: str = "") -> DoctorCheck:
    """Check the installed version of a package against ``requirement``; ``consequence`` says what breaks otherwise."""
    from packaging.requirements import Requirement

    package = Requirement(requirement)
    try:
        version = importlib.metadata.version(package.name)
    except importlib.metadata.PackageNotFoundError:
        return DoctorCheck(FAIL, package.name, "not installed", REINSTALL)
    if package.specifier.contains(version, prereleases=True):
        return DoctorCheck(OK, package.name, version)
    reason = f" ({consequence})" if consequence else ""
    return DoctorCheck(FAIL, package.name, f"{version} is outside {package.specifier}{reason}", REINSTALL)


def _git() -> DoctorCheck:
    if shutil.which("git"):
        return DoctorCheck(OK, "git", "found")
    return DoctorCheck(WARN, "git", "not found: registered models will lack their git revision", "install git")


def _processors() -> Iterator[DoctorCheck]:
    try:
        import torch
    except (ImportError, OSError) as error:
        yield DoctorCheck(FAIL, "torch import", str(error).splitlines()[0], REINSTALL)
        return
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads()
    if threads > allowed:
        remedy = f"set OMP_NUM_THREADS={allowed}"
        yield DoctorCheck(WARN, "threads", f"torch uses {threads} threads on {allowed} processors", remedy)
    else:
        yield DoctorCheck(OK, "threads", f"torch uses {threads} of {allowed} processors")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = ", ".join(torch.cuda.get_device_name(i) for i in range(count))
    yield DoctorCheck(OK, "gpu", f"{count}: {names}" if count else "none; training runs on the CPU")


def _products() -> Iterator[DoctorCheck]:
    """Say it where NumPy lacks what ``rlhf_core.models.openblas_linear`` would use."""
    if is_amd_with_full_avx512() and (kernels := numpy_kernels()) not in AVX512_KERNELS:
        finding = "NumPy has no OpenBLAS, which would use this processor's AVX-512"
        if kernels:
            finding = f"NumPy's OpenBLAS has {kernels} kernels, which do without this processor's AVX-512"
        remedy = "training in float32 takes up to half as long again; unset OPENBLAS_CORETYPE, or install NumPy by pip"
        yield DoctorCheck(WARN, "products", finding, remedy)


def _memory() -> DoctorCheck:
    import psutil

    free = psutil.virtual_memory().available / 2**30
    text = f"{free:.1f} GiB available"
    if free >= 4:
        return DoctorCheck(OK, "memory", text)
    return DoctorCheck(WARN, "memory", text, "the demo needs up to 4 GiB for all its processes; close other programs")
