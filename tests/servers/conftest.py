"""Real servers for the tests of this folder (up.sh), and the registry's fixtures on MLflow with
PostgreSQL.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from integration.registry.conftest import (
    Backend,
    champion_and_challenger,
    champion_and_challenger_on_server,
    contest,
    finished,
    workspace,
)
from servers.small_registry import SmallRegistry

__all__ = [
    "champion_and_challenger",
    "champion_and_challenger_on_server",
    "contest",
    "finished",
    "workspace",
]
SCRIPT = Path(__file__).with_name("up.sh")


@dataclass(frozen=True)
class Servers:
    """The servers of up.sh whose state is in ``folder``; ``output`` is what starting them
    printed.
    """

    folder: Path
    output: str = ""

    def call(self, *words: str) -> str:
        """Run a command of up.sh and return what it printed."""
        env = {**os.environ, "RLHF_SERVERS": str(self.folder), "PYTHON": sys.executable}
        ended = subprocess.run(
            ["bash", str(SCRIPT), *words], env=env, capture_output=True, text=True, timeout=900
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    @property
    def environment(self) -> dict[str, str]:
        """What a shell needs to use them."""
        lines = (self.folder / "env").read_text().splitlines()
        settings = [word for line in lines for word in shlex.split(line.removeprefix("export "))]
        return dict(setting.split("=", 1) for setting in settings)

    def require(self, name: str) -> None:
        """Skip the test, with the reason, where server ``name`` was left out."""
        skipped = [line for line in self.output.splitlines() if line.startswith(f"skipped {name}:")]
        if skipped:
            pytest.skip(skipped[0])


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    """All servers that can be started here. Those that RLHF_SERVERS names are used and stay up."""
    if lasting := os.environ.get("RLHF_SERVERS"):
        used = Servers(Path(lasting))
        yield Servers(used.folder, used.call("up"))
        return
    # pytest's own temporary folders are closed to the user that PostgreSQL runs as.
    folder = Path(tempfile.mkdtemp(prefix="rlhf-servers-"))
    try:
        yield Servers(folder, Servers(folder).call("up"))
    finally:
        Servers(folder).call("down")
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def mlflow_server(servers: Servers) -> Iterator[str]:
    """The address of MLflow on PostgreSQL; name and password are in the environment."""
    servers.require("mlflow")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
            patch.setenv(name, servers.environment[name])
        yield servers.environment["MLFLOW_TRACKING_URI"]


@pytest.fixture
def backend(mlflow_server: str) -> Backend:
    return Backend(mlflow_server)


@pytest.fixture
def registry(tmp_path: Path, mlflow_server: str, monkeypatch: pytest.MonkeyPatch) -> SmallRegistry:
    """A registered model of the test's own on that server."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    return SmallRegistry.create(tmp_path, mlflow_server)
