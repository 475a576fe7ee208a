"""``rlhf up`` keeps server, workers and the MLflow UI running; ``rlhf deploy`` sets a server up."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from flows.commands.display import Display, open_display
from flows.dvc_repo.recipe import check_recipe
from flows.dvc_repo.root import ensure_dvc
from flows.prefect_server.services import (
    LOOPBACK,
    Services,
    check_port_option,
    claim_port,
    connection_problem,
    known_url,
    open_services,
    wait_for_server,
)
from flows.registry.policies import active_policies
from flows.supervision import signals
from flows.supervision.processes import CHILD_SETTINGS, LEASES
from flows.workspace import forget_services, locked, record_services
from rlhf_core.config.loading import load_params
from rlhf_core.config.params import Params
from rlhf_core.errors import EXIT_INTERRUPTED, EXIT_OK, RlhfError, named_line

if TYPE_CHECKING:
    from flows.prefect_server.monitor import ServiceMonitor

MLFLOW = "mlflow"
WORKER_RESTARTS = 10
POLL_SECONDS = 0.3


def up(workspace: Path, port: int | None = None, mlflow_port: int | None = None) -> int:
    """Start all services and keep them running until a signal; return the exit status.

    Args:
        port: Of the Prefect server; None for any free one.
        mlflow_port: Of the MLflow UI; likewise.

    Raises:
        RlhfError: a service cannot be started, or kept dying.
    """
    signals.install()
    check_port_option(port)
    params = load_params(workspace)
    check_recipe(workspace)
    mlflow_port = claim_port(mlflow_port, "the MLflow UI", "--mlflow-port")
    with open_display(workspace, "preparing the workspace") as display:
        ensure_dvc(workspace)
        for policy in active_policies(params.registry):
            policy.name_files()
        with locked(workspace):  # a run that is under way has services of its own
            pass
        with locked(workspace, "services.lock") as lock:
            return _serve(
                open_services(workspace, port, display.line, lock), params, mlflow_port, display
            )


def deploy(workspace: Path, say: Callable[[str], None]) -> None:
    """Create or update a workspace's pools, deployments and automation on the server that is named.

    Args:
        say: Is told what was made, what the server lacks, and which workers are to be started.

    Raises:
        RlhfError: no server is named or answers, it refuses something, or a name belongs to another
            workspace.
    """
    params = load_params(workspace)
    check_recipe(workspace)
    ensure_dvc(workspace)
    url = known_url(workspace)
    if not url:
        raise RlhfError(
            "no Prefect server is named; set PREFECT_API_URL, or use `rlhf up`, which starts one"
        )
    if problem := connection_problem(url):
        raise RlhfError(f"the Prefect server at {url} does not answer ({problem})")
    os.environ["PREFECT_API_URL"] = url  # before Prefect is loaded
    import httpx

    from flows.jobs.deployments import deploy_all
    from flows.prefect_server.flow_runs import ensure_zombie_automation
    from flows.prefect_server.pools import PIPELINES_POOL, forgets_leases, missing_worker

    try:
        deploy_all(workspace, params)
        ensure_zombie_automation(say)
        if forgets_leases():
            say(
                "a restart of this Prefect server will end the pipelines that run: start it with "
                f"{LEASES}={CHILD_SETTINGS[LEASES]}"
            )
        say(f"deployed {workspace} to {url}; `prefect deployment ls` shows it")
        pools = dict.fromkeys([PIPELINES_POOL, *params.pool_names()])
        commands = [command for pool in pools if (command := missing_worker(pool))]
        if commands:
            say(f"runs wait for workers that are not there; with PREFECT_API_URL={url} set, start")
            say("\n".join(f"  {command}" for command in commands))
    except httpx.HTTPError as error:
        raise RlhfError(
            f"the Prefect server at {url} refused a request ({named_line(error)})"
        ) from error


def _serve(services: Services, params: Params, mlflow_port: int, display: Display) -> int:
    """Keep the services running until a signal, and stop them; return the exit status."""
    display.phase("starting Prefect and MLflow")
    try:
        monitor = _start_services(services, params, mlflow_port, display)
        display.close()
        while not signals.STOP.wait(POLL_SECONDS):
            if problem := monitor.check():
                raise RlhfError(problem)
        return EXIT_OK if signals.last() == signal.SIGTERM else EXIT_INTERRUPTED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    finally:
        from flows.prefect_server.monitor import end_active_runs

        if signals.last() == signal.SIGINT and sys.stderr.isatty():
            display.line("")  # the terminal has written ^C at the beginning of the line
        display.phase("stopping")
        forget_services(services.workspace)
        end_active_runs(services, True, "rlhf up was stopped", display.line)
        services.stop()


def _start_services(
    services: Services, params: Params, mlflow_port: int, display: Display
) -> ServiceMonitor:
    """Start the MLflow UI and the workers, set up pools and deployments, record the addresses."""
    # These load Prefect, which takes a second, in which the server starts.
    from flows.jobs.deployments import deploy_all
    from flows.prefect_server.flow_runs import end_stale_runs, ensure_zombie_automation
    from flows.prefect_server.monitor import ServiceMonitor
    from flows.prefect_server.pools import PIPELINES_POOL

    workspace = services.workspace
    mlflow_url = _start_mlflow(services, mlflow_port)
    if services.embedded:
        wait_for_server(services)
        end_stale_runs()
    deploy_all(workspace, params)
    ensure_zombie_automation(display.line)
    pools = [*params.pool_names(), PIPELINES_POOL]
    monitor = ServiceMonitor(services, params, pools, display.line, WORKER_RESTARTS)
    monitor.start_missing()
    record_services(workspace, services.api_url, mlflow_url)
    for line in deep_links(workspace, services.ui_url):
        display.line(line)
    display.line(
        "up: scheduled runs start by themselves, `rlhf run` here uses this server; Ctrl-C stops everything"
    )
    return monitor


def deep_links(workspace: Path, prefect_url: str) -> list[str]:
    """Return the addresses of the pages that a person opens: runs, schedules, registered models."""
    from flows.registry.client import connect, experiment_id, mlflow_address
    from rlhf_core.tracking.pipeline_run import MODEL_TRAINING

    lines = [f"Prefect: runs {prefect_url}/runs", f"         schedules {prefect_url}/deployments"]
    address = mlflow_address(workspace)
    if address is not None:
        experiment = experiment_id(connect(workspace), workspace)
        lines.append(f"MLflow:  runs {address}/#/experiments/{experiment}/runs{MODEL_TRAINING}")
        lines.append(f"         models {address}/#/models{MODEL_TRAINING}")
    return lines


def _start_mlflow(services: Services, port: int) -> str:
    """Return the address of the MLflow UI, which is started here unless a server is set."""
    from flows.registry.client import prepare_tracking
    from rlhf_core.tracking.stage_run import tracking_uri

    prepare_tracking(services.workspace)
    uri = tracking_uri(services.workspace)
    if uri.startswith(("http://", "https://")):
        return uri
    command = [sys.executable, "-m", "mlflow", "server", "--host", LOOPBACK, "--port", str(port)]
    services.start(MLFLOW, [*command, "--backend-store-uri", uri, "--workers", "1"])
    return f"http://{LOOPBACK}:{port}"
