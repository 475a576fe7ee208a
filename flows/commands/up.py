"""``rlhf up``: server, workers and the MLflow UI in the foreground, for schedules and for looking around."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flows.commands.display import Display
from flows.dvc_repo.root import ensure_dvc
from flows.prefect_server.server_watchdog import ServerWatchdog
from flows.prefect_server.services import (
    SERVER,
    Services,
    start_server,
    use_server_of_environment,
    wait_for_server,
    worker_name,
)
from flows.supervision import signals
from flows.supervision.ports import LOOPBACK, claim_port
from flows.supervision.processes import OWNER_VARIABLE, SupervisedProcess, kill_leftover_processes, ownership_tag
from flows.workspace.lock import locked
from flows.workspace.services_file import forget_services, record_services
from rlhf_core.config.loading.load import Params, load_params
from rlhf_core.errors import EXIT_INTERRUPTED, EXIT_OK, RlhfError

if TYPE_CHECKING:
    from flows.prefect_server.workers import PoolWorkers

MLFLOW = "mlflow"
RESTARTS = 10


@dataclass
class UpOptions:
    """Ports; None for any free one."""

    port: int | None = None
    mlflow_port: int | None = None


def up(workspace: Path, options: UpOptions) -> int:
    """Start everything, say where it is, and stay until a signal or until something essential ends."""
    signals.install()
    params = load_params(workspace)
    display = Display(workspace)
    mlflow_port = claim_port(options.mlflow_port, "the MLflow UI", "--mlflow-port")
    ensure_dvc(workspace)
    with _alone(workspace):
        os.environ[OWNER_VARIABLE] = ownership_tag(workspace)
        services = _server(workspace, options, display)
        try:
            serving = _start_rest(services, params, mlflow_port, display)
            return _watch(services, serving, display)
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
        finally:
            display.line("stopping")
            forget_services(workspace)
            _rest(services)
            services.stop()
            kill_leftover_processes(workspace, patience=1.0)


def _alone(workspace: Path):  # type: ignore[no-untyped-def]
    """The lock of the services: one embedded server per workspace. A run that is under way has its own: wait it out."""
    with locked(workspace):
        kill_leftover_processes(workspace)
    return locked(workspace, "services.lock")


def _server(workspace: Path, options: UpOptions, display: Display) -> Services:
    url = use_server_of_environment()
    if url is None:
        return start_server(workspace, options.port)
    if options.port is not None:
        raise RlhfError("--port is for the embedded server, but PREFECT_API_URL names another; use one of the two")
    display.line(f"Prefect server {url}")
    return Services(workspace, url, embedded=False)


def _start_rest(services: Services, params: Params, mlflow_port: int, display: Display) -> PoolWorkers:
    from flows.jobs import deployments as deploy
    from flows.prefect_server import automations, pools
    from flows.prefect_server import flow_runs as admin
    from flows.prefect_server import workers as serving

    workspace = services.workspace
    mlflow_ui = _start_mlflow(services, mlflow_port)
    if services.embedded:
        wait_for_server(services, signals.STOP.is_set)
        admin.end_stale_runs()
    deploy.deploy_jobs(workspace, params)
    pools.ensure_pools([pools.PIPELINES_POOL])
    deploy.deploy_all(workspace)
    automations.ensure_zombie_automation()
    served = serving.PoolWorkers(services, params, [*params.pool_names(), pools.PIPELINES_POOL])
    served.start()
    ui = services.api_url.removesuffix("/api")
    record_services(workspace, services.api_url, {"prefect": ui, "mlflow": mlflow_ui})
    display.line(f"Prefect UI {ui}")
    display.line(f"MLflow UI  {mlflow_ui}")
    display.line("up: scheduled runs start by themselves, `rlhf run` here uses this server; Ctrl-C stops everything")
    return served


def _start_mlflow(services: Services, port: int) -> str:
    """The address of the MLflow UI: the server that ``MLFLOW_TRACKING_URI`` names, else one that is started here."""
    from flows.registry.mlflow_client import prepare_tracking

    uri = prepare_tracking(services.workspace)
    if uri.startswith(("http://", "https://")):
        return uri
    command = [sys.executable, "-m", "mlflow", "server", "--host", LOOPBACK, "--port", str(port)]
    services.start(MLFLOW, [*command, "--backend-store-uri", uri, "--workers", "1"])
    return f"http://{LOOPBACK}:{port}"


def _watch(services: Services, serving: PoolWorkers, display: Display) -> int:
    """Until a signal. What has died is started again, but not for ever."""
    restarts = 0
    upkeep = ServerWatchdog(services, display.line)
    while not signals.STOP.wait(0.3):
        if problem := upkeep.look():
            raise RlhfError(problem)
        for service in services.dead_beside_server():
            if restarts >= RESTARTS:
                raise RlhfError(f"{service.name} ended (status {service.poll()}); see .rlhf/logs/{service.name}.log")
            restarts += 1
            time.sleep(1.0)
            _restart(services, serving, service, display)
        serving.keep()
    return EXIT_OK if signals.last() == 15 else EXIT_INTERRUPTED


def _restart(services: Services, serving: PoolWorkers, service: SupervisedProcess, display: Display) -> None:
    from flows.prefect_server import flow_runs as admin

    del services.running[service.name]
    if service.name == MLFLOW:
        display.line(f"the MLflow UI ended (status {service.poll()}); the record goes on without it")
        return
    display.line(f"{service.name} ended (status {service.poll()}), what it ran with it; starting it again")
    pool = service.name.removeprefix(worker_name(""))
    admin.crash_pool_runs(pool, "the worker and its job were killed")
    services.start_worker(pool, serving.params.pool_limit(pool))


def _rest(services: Services) -> None:
    if not services.embedded or any(service.name == SERVER for service in services.dead()):
        return
    from flows.prefect_server import flow_runs as admin

    try:
        admin.end_active_runs(True, "rlhf up was stopped")
    except Exception:  # the next start sweeps
        return
