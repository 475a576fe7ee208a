"""The embedded Prefect server and process workers, on loopback, as guarded children; or somebody's own server."""

from __future__ import annotations

import os
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from flows.supervision.environment import QUIET, child_environment, without_proxy
from flows.supervision.ports import LOOPBACK, claim_port
from flows.supervision.processes import SupervisedProcess, start_supervised
from flows.workspace.folder import private_path
from rlhf_core.config.loading.load import load_params
from rlhf_core.errors import RlhfError

START_SECONDS = 180.0
RESTART_SECONDS = 60.0
STOP_GRACE = 3.0
SERVER = "server"


@dataclass
class Services:
    """What this process has started, in order. ``api_url`` is the server that all of it talks to."""

    workspace: Path
    api_url: str
    embedded: bool
    running: dict[str, SupervisedProcess] = field(default_factory=dict)

    def start(self, name: str, command: list[str], grace: float = STOP_GRACE, **env: str) -> SupervisedProcess:
        """Start a service under the guard, its output in ``.rlhf/logs/NAME.log``."""
        service = start_supervised(
            command,
            name=name,
            cwd=self.workspace,
            env=child_environment(self.workspace, **env),
            log=private_path(self.workspace, "logs", f"{name}.log"),
            grace=grace,
            stop_signal="INT",
        )
        self.running[name] = service
        return service

    def start_worker(self, pool: str, limit: int = 1) -> SupervisedProcess:
        """A process worker for ``pool`` that takes ``limit`` jobs at a time and installs nothing.

        When it is stopped its jobs have the time that a stage is given to save its state.
        """
        command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool, "--type", "process"]
        command += ["--limit", str(limit), "--install-policy", "never"]
        grace = STOP_GRACE + load_params(self.workspace).flow.stop_grace_seconds
        return self.start(worker_name(pool), command, grace=grace)

    def dead(self) -> list[SupervisedProcess]:
        """Services that have ended though nobody stopped them."""
        return [service for service in self.running.values() if service.poll() is not None]

    def dead_beside_server(self) -> list[SupervisedProcess]:
        """The same without the server, which ``flows.prefect_server.server_watchdog`` sees to."""
        return [service for service in self.dead() if service.name != SERVER]

    def stop(self) -> None:
        """Stop everything, workers and server at the same time."""
        for service in reversed(self.running.values()):
            service.request_stop()
        for service in self.running.values():
            service.stop()
        self.running.clear()


def worker_name(pool: str) -> str:
    """The service name of the worker of ``pool``."""
    return f"worker-{pool}"


def use_server_of_environment() -> str | None:
    """``PREFECT_API_URL`` if it is set and answers, None if it is not set; ``RlhfError`` if it does not answer."""
    url = os.environ.get("PREFECT_API_URL", "").strip().rstrip("/")
    if not url:
        return None
    problem = _problem(url)
    if problem:
        raise RlhfError(
            f"no Prefect server answers at PREFECT_API_URL={url} ({problem}); start it or unset the variable"
        )
    os.environ.update(QUIET, NO_PROXY=without_proxy(), no_proxy=without_proxy())
    return url


def wait_for_other_server(url: str, stopping: Callable[[], bool]) -> None:
    """Give the server of another command, which starts it again when it dies, up to a minute to answer."""
    deadline = time.monotonic() + RESTART_SECONDS
    while _problem(url, seconds=1.0) and not stopping() and time.monotonic() < deadline:
        time.sleep(0.2)


def start_server(workspace: Path, port: int | None = None) -> Services:
    """Start the embedded server (not waiting for it) and point this process's Prefect settings at it."""
    port = claim_port(port, "the Prefect server")
    home = private_path(workspace, "prefect", "home")
    url = f"http://{LOOPBACK}:{port}/api"
    os.environ.update(
        QUIET,
        NO_PROXY=without_proxy(),
        no_proxy=without_proxy(),
        PREFECT_HOME=str(home),
        PREFECT_API_URL=url,
        PREFECT_API_DATABASE_CONNECTION_URL=f"sqlite+aiosqlite:///{home.parent / 'prefect.db'}",
        PREFECT_LOGGING_LEVEL=os.environ.get("PREFECT_LOGGING_LEVEL", "INFO"),
    )
    for name in ("PREFECT_API_KEY", "PREFECT_PROFILE", "PREFECT_API_AUTH_STRING", "PREFECT_SERVER_API_AUTH_STRING"):
        os.environ.pop(name, None)
    services = Services(workspace, url, embedded=True)
    services.start(SERVER, _server_command(port))
    return services


def restart_server(services: Services, stopping: Callable[[], bool]) -> None:
    """Start the embedded server again where it was, with all that it knew, and wait until it answers.

    Flows, jobs and workers ask again for about a minute before they give up.
    """
    services.running[SERVER].stop()
    port = urllib.parse.urlsplit(services.api_url).port
    assert port is not None
    services.start(SERVER, _server_command(port))
    wait_for_server(services, stopping)


def _server_command(port: int) -> list[str]:
    return [sys.executable, "-m", "prefect", "server", "start", "--host", LOOPBACK, "--port", str(port)]


def wait_for_server(services: Services, stopping: Callable[[], bool]) -> None:
    """Until the server answers; ``RlhfError`` with the place of its log if it ends or is too slow."""
    log = private_path(services.workspace, "logs", "server.log")
    deadline = time.monotonic() + START_SECONDS
    while _problem(services.api_url, seconds=1.0):
        if stopping():
            raise KeyboardInterrupt
        if services.running[SERVER].poll() is not None:
            raise RlhfError(f"the Prefect server ended as it started; see {log}")
        if time.monotonic() > deadline:
            raise RlhfError(f"the Prefect server did not answer within {START_SECONDS:.0f} s; see {log}")
        time.sleep(0.1)


def _problem(url: str, seconds: float = 5.0) -> str | None:
    """Why ``url`` does not answer as a server does; None if it does (an HTTP refusal is an answer)."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=seconds):
            return None
    except urllib.error.HTTPError as error:
        return None if error.code in (401, 403, 404) else f"HTTP {error.code}"
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error)) or type(error).__name__
