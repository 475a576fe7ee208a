"""What ``rlhf doctor`` finds of machine, packages and services, whatever the workspace."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flows.prefect_server.services import LOOPBACK, free_port, tls_of_prefect
from flows.registry.client import knock
from rlhf_core.commands.plugged import EXTRAS, plugged_app
from rlhf_core.errors import RlhfError
from rlhf_core.plugins import COMMANDS, PluginError, plugins_of
from rlhf_core.runtime.machine import AVX512_KERNELS, is_amd_with_full_avx512, numpy_kernels
from rlhf_core.tracking.delivery import address
from rlhf_core.tracking.stage_run import require_database

if TYPE_CHECKING:
    from packaging.requirements import Requirement

OK, WARN, FAIL = "ok", "warn", "fail"
GIB = 2**30


@dataclass(frozen=True)
class DoctorCheck:
    """The result of one check; ``remedy`` says what to do, and is empty if nothing is."""

    level: str
    name: str
    finding: str
    remedy: str = ""


DISTRIBUTION = "rlhf-pipeline"
SUPPORTED = ((3, 11), (3, 13))
REINSTALL = "install the pinned requirements.lock again (`make setup`)"
# Requirements whose version is always shown, and what breaks outside it. Newer versions of the
# first two break servers although `pip check` is clean.
SHOWN = {
    "fastapi": "newer ones refuse requests of the Prefect client, or keep its server from starting",
    "sqlalchemy": "with 2.1 scheduled runs are never created, and only a log says so",
    **dict.fromkeys(
        ("torch", "transformers", "prefect", "dvc", "mlflow", "great-expectations"), ""
    ),
}


def machine_checks() -> Iterator[DoctorCheck]:
    """Check what does not depend on a workspace."""
    import psutil

    interpreter = f"Python {sys.version.split()[0]}"
    if SUPPORTED[0] <= sys.version_info[:2] <= SUPPORTED[1]:
        yield DoctorCheck(OK, "python", interpreter)
    else:
        yield DoctorCheck(FAIL, "python", interpreter, "use Python 3.11, 3.12 or 3.13")
    yield from _packages()
    yield from plugin_checks()
    if shutil.which("git"):
        yield DoctorCheck(OK, "git", "found")
    else:
        yield DoctorCheck(
            WARN, "git", "not found: registered models will lack their git revision", "install git"
        )
    yield from _processors()
    yield from _products()
    free = psutil.virtual_memory().available / GIB
    if free >= 4:
        yield DoctorCheck(OK, "memory", f"{free:.1f} GiB available")
    else:
        remedy = "the demo needs up to 4 GiB for all its processes; close other programs"
        yield DoctorCheck(WARN, "memory", f"{free:.1f} GiB available", remedy)


def _packages() -> Iterator[DoctorCheck]:
    """Check the versions of what this package requires, and name those of :data:`SHOWN`."""
    from packaging.requirements import Requirement

    try:
        listed = importlib.metadata.requires(DISTRIBUTION) or ()
    except importlib.metadata.PackageNotFoundError:
        yield DoctorCheck(
            WARN,
            "packages",
            f"{DISTRIBUTION} is not installed: versions are not checked",
            REINSTALL,
        )
        return
    for package in map(Requirement, listed):
        if package.marker is None:  # an extra's has one
            check = check_package(package, SHOWN.get(package.name, ""))
            if check.level != OK or package.name in SHOWN:
                yield check


def plugin_checks() -> Iterator[DoctorCheck]:
    """Check that the extras' commands are known, and that all plugins can be imported."""
    known = plugins_of(COMMANDS)
    missing = [path.replace(".", " ") for path in EXTRAS if path not in known]
    if missing:
        finding = f"this installation does not know rlhf {', '.join(missing)}"
        yield DoctorCheck(WARN, "extras", finding, f"install {DISTRIBUTION} again (`make setup`)")
    for name in known:
        try:
            plugged_app(name)
        except PluginError as error:
            yield DoctorCheck(WARN, "plugins", str(error))


def check_package(package: Requirement, consequence: str = "") -> DoctorCheck:
    """Check the installed version of a package; ``consequence`` says what breaks otherwise."""
    try:
        version = importlib.metadata.version(package.name)
    except importlib.metadata.PackageNotFoundError:
        return DoctorCheck(FAIL, package.name, "not installed", REINSTALL)
    if package.specifier.contains(version, prereleases=True):
        return DoctorCheck(OK, package.name, version)
    reason = f" ({consequence})" if consequence else ""
    return DoctorCheck(
        FAIL, package.name, f"{version} is outside {package.specifier}{reason}", REINSTALL
    )


def _processors() -> Iterator[DoctorCheck]:
    try:
        import torch
    except (ImportError, OSError) as error:
        yield DoctorCheck(FAIL, "torch import", str(error).splitlines()[0], REINSTALL)
        return
    allowed = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    threads = torch.get_num_threads()
    if threads > allowed:
        remedy = f"set OMP_NUM_THREADS={allowed}"
        yield DoctorCheck(
            WARN, "threads", f"torch uses {threads} threads on {allowed} processors", remedy
        )
    else:
        yield DoctorCheck(OK, "threads", f"torch uses {threads} of {allowed} processors")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = ", ".join(torch.cuda.get_device_name(i) for i in range(count))
    yield DoctorCheck(OK, "gpu", f"{count}: {names}" if count else "none; training runs on the CPU")


def _products() -> Iterator[DoctorCheck]:
    """Say it where NumPy lacks what ``rlhf_core.models.kernels`` would use."""
    if is_amd_with_full_avx512() and (kernels := numpy_kernels()) not in AVX512_KERNELS:
        finding = "NumPy has no OpenBLAS, which would use this processor's AVX-512"
        if kernels:
            finding = (
                f"NumPy's OpenBLAS has {kernels} kernels, which do without this processor's AVX-512"
            )
        remedy = "training in float32 takes up to half as long again; unset OPENBLAS_CORETYPE, or install NumPy by pip"
        yield DoctorCheck(WARN, "products", finding, remedy)


def service_checks() -> Iterator[DoctorCheck]:
    """Check ports, Prefect, MLflow and the model hub."""
    try:
        yield DoctorCheck(OK, "ports", f"free ones on {LOOPBACK}, for example {free_port()}")
    except OSError as error:
        remedy = "allow this user to listen on the loopback address"
        yield DoctorCheck(FAIL, "ports", f"cannot listen on {LOOPBACK} ({error.strerror})", remedy)
    yield _prefect()
    yield _mlflow()
    if os.environ.get("HF_HUB_OFFLINE") in ("1", "true", "TRUE"):
        yield DoctorCheck(
            OK, "hub", "offline (HF_HUB_OFFLINE): hub ids load from the local cache only"
        )


def _prefect() -> DoctorCheck:
    url = os.environ.get("PREFECT_API_URL")
    if not url:
        return DoctorCheck(OK, "prefect api", "embedded: `rlhf run` starts a server of its own")
    import httpx

    try:
        response = httpx.get(f"{url.rstrip('/')}/health", timeout=5, verify=tls_of_prefect())
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        finding = f"PREFECT_API_URL={url} does not answer ({str(error) or type(error).__name__})"
        return DoctorCheck(
            FAIL, "prefect api", finding, "start that server, or unset PREFECT_API_URL"
        )
    if response.status_code == 200:
        return DoctorCheck(OK, "prefect api", f"{url} answers")
    finding = f"PREFECT_API_URL={url} answers /health with status {response.status_code}"
    return DoctorCheck(
        WARN, "prefect api", finding, "the address must end in /api; check it and PREFECT_API_KEY"
    )


def _mlflow() -> DoctorCheck:
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        return DoctorCheck(OK, "mlflow", "SQLite in the workspace")
    if not uri.startswith(("http://", "https://")):
        try:
            require_database(uri)
        except RlhfError as error:
            return DoctorCheck(FAIL, "mlflow", str(error))
        return DoctorCheck(OK, "mlflow", f"{address(uri)} answers")
    try:
        knock(uri)
    except (OSError, ValueError) as error:
        finding = f"MLFLOW_TRACKING_URI={uri} does not answer ({error})"
        return DoctorCheck(
            FAIL, "mlflow", finding, "start that server, or unset MLFLOW_TRACKING_URI"
        )
    return DoctorCheck(OK, "mlflow", f"{uri} answers")
