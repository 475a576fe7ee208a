"""An external Prefect server, as several workspaces share one, that a test can kill and restart."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.settings import PREFECT_API_URL, temporary_settings
from toys import wait_until

from flows.prefect_server.services import LOOPBACK, claim_port
from flows.supervision.processes import CHILD_SETTINGS

ACTIVE = [StateType.RUNNING, StateType.PENDING, StateType.CANCELLING]


class LastingServer:
    """A server on a port of its own; ``env`` points clients at it."""

    def __init__(self, folder: Path) -> None:
        self.port = claim_port(None, "the Prefect server")
        self.url = f"http://{LOOPBACK}:{self.port}/api"
        self.env = {"PREFECT_API_URL": self.url, "PREFECT_HOME": str(folder / "home")}
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start or restart the server on its database, and wait until it answers."""
        database = f"sqlite+aiosqlite:///{self.folder}/prefect.db"
        env = {**os.environ, **CHILD_SETTINGS, **self.env, "PREFECT_API_DATABASE_CONNECTION_URL": database}
        env.pop("PREFECT_API_URL")
        command = [sys.executable, "-m", "prefect", "server", "start", "--host", LOOPBACK, "--port", str(self.port)]
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        wait_until(self._answers, 600, "answer of the Prefect server")

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2):
                return True
        except OSError:
            return False

    def kill(self) -> None:
        """Kill the server with SIGKILL."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def runs(self, types: list[StateType] | None = None) -> list[FlowRun]:
        """Return the flow runs on the server, all or those in states of ``types``."""
        wanted = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=types))) if types else None
        with temporary_settings({PREFECT_API_URL: self.url}), get_client(sync_client=True) as client:
            return client.read_flow_runs(flow_run_filter=wanted)
