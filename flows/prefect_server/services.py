"""The services of a run on free loopback ports: an embedded Prefect server and its workers, or an
external server.
"""

from __future__ import annotations

import os
import socket
import ssl
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from flows.supervision.processes import (
    CHILD_SETTINGS,
    SupervisedProcess,
    child_environment,
    no_proxy_hosts,
    start_supervised,
)
from flows.supervision.signals import STOP
from flows.workspace import private_path, running_services
from rlhf_core.config.loading import load_params
from rlhf_core.errors import RlhfError, named_line

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient


LOOPBACK = "127.0.0.1"


def free_port() -> int:
    """Return a port on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def claim_port(requested: int | None, service: str, option: str = "--port") -> int:
    """Return ``requested`` if it can be bound, or any free port when it is None.

    Raises:
        RlhfError: the port is taken or out of range; the message names ``service`` and the
            command-line ``option``.
    """
    if requested is None:
        return free_port()
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, requested))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or "out of range"
            raise RlhfError(
                f"port {requested} for {service} cannot be used ({reason}); free it or choose another with {option}"
            ) from error
    return requested


START_SECONDS = 180.0
RESTART_SECONDS = 60.0
STOP_GRACE = 3.0
SERVER = "server"
WORKER_PREFIX = "worker-"
PREFECT = (sys.executable, "-m", "prefect")
SERVE = (*PREFECT, "server", "start", "--host", LOOPBACK, "--port")


@dataclass
class Services:
    """The service processes that this process has started, in order, and the Prefect server that
    they use.

    Their supervisors keep the file descriptor ``lock`` open until the last process has ended.
    """

    workspace: Path
    api_url: str
    embedded: bool
    lock: int | None = None
    running: dict[str, SupervisedProcess] = field(default_factory=dict)

    @property
    def client_settings(self) -> dict[str, str]:
        """Settings of Prefect's client for the flow and the workers: how long they try to reach the
        server.

        An embedded server is restarted in seconds. Another may be away for minutes, and Prefect's
        own minute would end in a failed stage.
        """
        return {} if self.embedded else {"PREFECT_CLIENT_MAX_RETRIES": "8"}

    @property
    def ui_url(self) -> str:
        """The address of the Prefect UI."""
        return self.api_url.removesuffix("/api")

    def start(self, name: str, command: list[str], grace: float = STOP_GRACE, **env: str) -> None:
        """Start a service, to be stopped with the others."""
        self.running[name] = self.launch(name, command, grace, "INT", **env)

    def launch(
        self, name: str, command: list[str], grace: float, stop_signal: str, **env: str
    ) -> SupervisedProcess:
        """Start a process under a supervisor; its output goes to ``.rlhf/logs/NAME.log``."""
        return start_supervised(
            command,
            name=name,
            cwd=self.workspace,
            env=child_environment(self.workspace, **env),
            log=private_path(self.workspace, "logs", f"{name}.log"),
            grace=grace,
            stop_signal=stop_signal,
            inherited_descriptors=[] if self.lock is None else [self.lock],
        )

    def start_worker(self, pool: str, limit: int = 1) -> None:
        """Start a process worker for ``pool`` that takes ``limit`` jobs at a time and installs
        nothing.

        When it is stopped, its jobs have the grace period of a stage to save their state.
        """
        command = [*PREFECT, "worker", "start", "--pool", pool, "--type", "process"]
        command += ["--limit", str(limit), "--install-policy", "never"]
        grace = STOP_GRACE + load_params(self.workspace).flow.stop_grace_seconds
        self.start(worker_name(pool), command, grace=grace, **self.client_settings)

    def dead(self) -> list[SupervisedProcess]:
        """Return the services that have ended though nobody stopped them."""
        return [service for service in self.running.values() if service.poll() is not None]

    def stop(self) -> None:
        """Stop all services at the same time and wait for them."""
        for service in reversed(self.running.values()):
            service.request_stop()
        for service in self.running.values():
            service.stop()
        self.running.clear()


def worker_name(pool: str) -> str:
    """Return the service name of the worker of ``pool``."""
    return f"{WORKER_PREFIX}{pool}"


def check_port_option(port: int | None) -> None:
    """Raise ``RlhfError`` if a port for the embedded server is given although ``PREFECT_API_URL``
    names another.
    """
    if port is not None and os.environ.get("PREFECT_API_URL"):
        raise RlhfError(
            "--port is for the embedded server, but PREFECT_API_URL names another; use one of the two"
        )


def embedded_database(workspace: Path) -> str:
    """Return the address of the database of the Prefect server that serves this workspace alone."""
    return f"sqlite+aiosqlite:///{private_path(workspace.resolve(), 'prefect') / 'prefect.db'}"


def open_services(
    workspace: Path, port: int | None, report: Callable[[str], None], lock: int | None = None
) -> Services:
    """Use the server of ``PREFECT_API_URL`` or of a running ``rlhf up`` here, else start an
    embedded one on ``port``.

    A server of ``rlhf up`` that has just died has up to a minute to be restarted. The embedded one
    is not waited for. This process's Prefect settings point at whichever it is.

    Raises:
        RlhfError: nothing answers at the address, or the port cannot be used.
    """
    if url := known_url(workspace):
        own = url == running_services(workspace).get("api_url")
        deadline = time.monotonic() + (RESTART_SECONDS if own else 0.0)
        while problem := connection_problem(url):
            if STOP.is_set() or time.monotonic() >= deadline:
                raise RlhfError(
                    f"no Prefect server answers at PREFECT_API_URL={url} ({problem}); start it or unset the variable"
                )
            time.sleep(0.2)
        os.environ.update(
            CHILD_SETTINGS,
            NO_PROXY=no_proxy_hosts(),
            no_proxy=no_proxy_hosts(),
            PREFECT_API_URL=url,
        )
        report(f"Prefect server {url}")
        return Services(workspace, url, embedded=False, lock=lock)
    port = claim_port(port, "the Prefect server")
    home = private_path(workspace, "prefect", "home")
    url = f"http://{LOOPBACK}:{port}/api"
    os.environ.update(
        CHILD_SETTINGS,
        NO_PROXY=no_proxy_hosts(),
        no_proxy=no_proxy_hosts(),
        PREFECT_HOME=str(home),
        PREFECT_API_URL=url,
        PREFECT_API_DATABASE_CONNECTION_URL=embedded_database(workspace),
        PREFECT_LOGGING_LEVEL=os.environ.get("PREFECT_LOGGING_LEVEL", "INFO"),
    )
    for name in (
        "PREFECT_API_KEY",
        "PREFECT_PROFILE",
        "PREFECT_API_AUTH_STRING",
        "PREFECT_SERVER_API_AUTH_STRING",
    ):
        os.environ.pop(name, None)
    services = Services(workspace, url, embedded=True, lock=lock)
    services.start(SERVER, [*SERVE, str(port)])
    return services


def restart_server(services: Services) -> None:
    """Restart the embedded server on its port and database, and wait until it answers.

    Flows, jobs and workers repeat their requests for about a minute before they give up.
    """
    services.running[SERVER].stop()
    services.start(SERVER, [*SERVE, str(urllib.parse.urlsplit(services.api_url).port)])
    wait_for_server(services)


def wait_for_server(services: Services) -> None:
    """Wait until the embedded server answers.

    Raises:
        RlhfError: the server exits or takes too long; the message names its log.
        KeyboardInterrupt: the stop flag was raised.
    """
    log = private_path(services.workspace, "logs", f"{SERVER}.log")
    deadline = time.monotonic() + START_SECONDS
    while connection_problem(services.api_url, seconds=1.0):
        if STOP.is_set():
            raise KeyboardInterrupt
        if services.running[SERVER].poll() is not None:
            raise RlhfError(f"the Prefect server exited while starting; see {log}")
        if time.monotonic() > deadline:
            raise RlhfError(
                f"the Prefect server did not answer within {START_SECONDS:.0f} s; see {log}"
            )
        time.sleep(0.1)


def known_url(workspace: Path) -> str:
    """Return the address at ``PREFECT_API_URL``, else of ``rlhf up`` in ``workspace``; empty where
    there is neither.
    """
    return os.environ.get("PREFECT_API_URL", "").strip().rstrip("/") or running_services(
        workspace
    ).get("api_url", "")


def connection_problem(url: str, seconds: float = 5.0) -> str | None:
    """Return why ``url`` does not answer as a Prefect server does, None if it does (refusing a
    login is an answer).
    """
    try:
        tls = tls_of_prefect() if url.startswith("https:") else None
        with urllib.request.urlopen(f"{url}/health", timeout=seconds, context=tls):
            return None
    except urllib.error.HTTPError as error:
        return None if error.code in (401, 403, 404) else f"HTTP {error.code}"
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLCertVerificationError):
            return (
                f"its certificate is not trusted: {reason.verify_message}; name the file of its certificate authority "
                "in PREFECT_API_SSL_CERT_FILE"
            )
        return str(reason) or type(error).__name__


def tls_of_prefect() -> ssl.SSLContext:
    """Return the settings of Prefect's client."""
    authorities = ("PREFECT_API_SSL_CERT_FILE", "SSL_CERT_FILE")
    return client_tls(authorities, "PREFECT_API_TLS_INSECURE_SKIP_VERIFY")


def client_tls(authorities: Sequence[str], unverified: str) -> ssl.SSLContext:
    """Return the settings for TLS that a library's client has, by the variables that it reads.

    Args:
        authorities: Variables that may name the certificates to trust, a file or a folder. The
            first that is set counts.
        unverified: The variable that switches verification off.

    Raises:
        FileNotFoundError: There is no such file.
    """
    import certifi

    if os.environ.get(unverified, "").lower() in ("true", "1"):
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context
    named = [name for name in authorities if os.environ.get(name)]
    if not named:
        return ssl.create_default_context(cafile=certifi.where())
    path = Path(os.environ[named[0]])
    if not path.exists():
        raise FileNotFoundError(f"{named[0]} names {path}, and there is no such file")
    if path.is_dir():
        return ssl.create_default_context(capath=path)
    return ssl.create_default_context(cafile=path)


SECONDS = 15.0


@contextmanager
def known_server(workspace: Path) -> Iterator[SyncPrefectClient | None]:
    """A client of the server at ``PREFECT_API_URL``, or of ``rlhf up`` in ``workspace``; None where
    there is neither.

    Raises:
        RlhfError: There is one, and it does not answer or refuses a request of the block.
    """
    url = known_url(workspace)
    if not url:
        yield None
        return
    if problem := connection_problem(url):
        raise RlhfError(f"the Prefect server at {url} does not answer ({problem})")
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL, temporary_settings

    try:
        with (
            temporary_settings({PREFECT_API_URL: url}),
            get_client({"timeout": SECONDS}, sync_client=True) as client,
        ):
            yield client
    except httpx.HTTPError as error:
        raise RlhfError(
            f"the Prefect server at {url} refused a request ({named_line(error)})"
        ) from error
