"""What several tests share: the environment of child processes, and one smoke run made by the real
command.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from background import make_prefect_database
from commands import OFFLINE, ROOT, SHARED_DATA, SmokeRun, run
from cpu_time import CpuTime
from distribution import LongestFirst, sort_by_length
from filelock import FileLock
from hypothesis import HealthCheck, settings
from plugin_distributions import Install, installer

from rlhf_core.plugins import plugins_of
from rlhf_core.storage.garbage_collection import (
    collect_rarely,
    paused_collector,
    skip_last_collection,
)

os.environ.update(
    OFFLINE
)  # here, since a conftest below may import torch, which reads the number of threads only then
SMOKE_SECONDS = 3000  # of the smoke run, which takes four minutes on two idle cores


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(CpuTime())
    # No test depends on how fast the machine is.
    settings.register_profile("house", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("house")
    # On a machine with a GPU the tests are of the CPU all the same: their numbers, ranks and
    # threads are.
    os.environ.setdefault("RLHF_DEVICE", "cpu")
    for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "RLHF_WORKSPACE", "RLHF_PARENT_RUN_ID"):
        os.environ.pop(name, None)
    collect_rarely()
    skip_last_collection()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import all test files without garbage collection, and leave what they made out of every later
    one.
    """
    with paused_collector():
        yield
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    sort_by_length(items)
    for item in items:
        if "smoke" in getattr(
            item, "fixturenames", ()
        ):  # the first of them makes the run, and the others wait for it
            item.add_marker(pytest.mark.timeout(SMOKE_SECONDS))


@pytest.fixture(autouse=True)
def device_of_the_test(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """The GPU for tests marked ``gpu`` (with RLHF_PRETENDED_GPU the pretended one), the CPU for all
    others.
    """
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    import torch

    if os.environ.get("RLHF_PRETENDED_GPU"):
        from pretended_gpu.device import pretended_gpu

        with pretended_gpu():
            yield
        return
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    monkeypatch.delenv("RLHF_DEVICE")
    yield


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LongestFirst | None:
    return LongestFirst(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(scope="session")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> SmokeRun:
    """One `rlhf init` + `rlhf run` of the smoke profile for the whole session, whichever process
    needs it first.
    """
    shared = _shared_folder(tmp_path_factory)
    workspace, record = shared / "smoke" / "workspace", shared / "smoke" / "completed.json"
    with FileLock(shared / "smoke.lock"):
        if not record.exists():
            completed = _run_smoke(workspace)
            record.write_text(
                json.dumps([*completed.args], default=str) + "\n" + json.dumps(completed.stdout)
            )
    words, printed = map(json.loads, record.read_text().splitlines())
    return SmokeRun(workspace, subprocess.CompletedProcess(words, 0, printed, ""))


@pytest.fixture(scope="session")
def prefect_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The database of a Prefect server without flows, made once for the whole session; tests copy
    it.
    """
    database = _shared_folder(tmp_path_factory) / "prefect.db"
    with FileLock(database.with_suffix(".lock")):
        if not database.exists():
            make_prefect_database(database)
    return database


def _shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder for temporary files that all workers have in common."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


def _run_smoke(workspace: Path) -> subprocess.CompletedProcess[str]:
    shutil.rmtree(workspace.parent, ignore_errors=True)
    workspace.parent.mkdir()
    made = run("rlhf", "init", workspace, "--profile", "smoke", cwd=ROOT)
    assert made.returncode == 0, made.stderr
    completed = run("rlhf", "run", "--workspace", workspace, cwd=ROOT, timeout=SMOKE_SECONDS)
    assert completed.returncode == 0, completed.stdout[-4000:] + completed.stderr[-4000:]
    return completed


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the test's own, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def smoke_copy(smoke: SmokeRun, tmp_path: Path) -> Path:
    """A workspace of the test's own with everything that the smoke run made, its DVC cache
    included.
    """
    target = tmp_path / "copy"
    shutil.copytree(
        smoke.workspace, target, symlinks=True, ignore=shutil.ignore_patterns("prefect", "tmp")
    )
    return target


@pytest.fixture
def shared_data() -> Callable[[str], Path]:
    """Path of a file of the shared third-party data; the test is skipped where it is absent."""

    def find(name: str) -> Path:
        if not (SHARED_DATA / name).exists():
            pytest.skip(f"third-party sample {name} is not in {SHARED_DATA}")
        return SHARED_DATA / name

    return find


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Makes a distribution with entry points of a group, known to this process for one test."""
    yield installer(tmp_path, monkeypatch)
    plugins_of.cache_clear()
