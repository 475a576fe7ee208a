"""``rlhf run``: lock, sweep, services, the flow in a child process, a summary, and nothing left behind."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.commands.display import Display
from flows.commands.summary import exit_code, summary
from flows.dvc_repo.root import ensure_dvc
from flows.pipeline.events import EVENTS_VARIABLE, EventReader, new_events_file
from flows.prefect_server.server_watchdog import ServerWatchdog
from flows.prefect_server.services import (
    SERVER,
    Services,
    start_server,
    use_server_of_environment,
    wait_for_other_server,
    wait_for_server,
    worker_name,
)
from flows.supervision import signals
from flows.supervision.environment import child_environment
from flows.supervision.processes import OWNER_VARIABLE, SupervisedProcess, ownership_tag, start_supervised
from flows.workspace.cleanup import cleanup
from flows.workspace.folder import cannot_write, private_path
from flows.workspace.lock import LOCK_HELD_VARIABLE, locked
from flows.workspace.services_file import running_services
from rlhf_core.config.loading.load import Params, load_params
from rlhf_core.errors import EXIT_INTERRUPTED, RlhfError

if TYPE_CHECKING:
    from flows.prefect_server.workers import PoolWorkers

FLOW_GRACE = 8.0
WORKER_RESTARTS = 3
TICK_SECONDS = 0.1


@dataclass
class RunOptions:
    """What the command line says about one run."""

    promote: bool = True
    wait: bool = False
    port: int | None = None


def run(workspace: Path, options: RunOptions) -> int:
    """Run the pipeline of ``workspace``; returns the exit status. ``RlhfError`` before anything has begun."""
    signals.install()
    display = Display(workspace)
    params = load_params(workspace)
    try:
        with locked(workspace, wait=options.wait, on_wait=display.line):
            os.environ[OWNER_VARIABLE] = os.environ[LOCK_HELD_VARIABLE] = ownership_tag(workspace)
            ensure_dvc(workspace)
            _check_away(workspace, params)
            for line in cleanup(workspace):
                display.line(line)
            return _Run(workspace, params, options, display).execute()
    except OSError as error:
        if isinstance(error, PermissionError) or error.errno in (28, 30):  # no space, read-only
            raise cannot_write(workspace, error) from error
        raise


def _check_away(workspace: Path, params: Params) -> None:
    """``RlhfError`` when stages are placed on other hosts, and there is no server or remote that those could reach."""
    away = params.pools_away()
    if away and not os.environ.get("PREFECT_API_URL") and running_services(workspace) is None:
        raise RlhfError(
            f"the work pool {away[0]} is served by other hosts (shared: false), which need a server that stays: start "
            "one and set PREFECT_API_URL (docs/operations.md)"
        )
    if away:
        from flows.jobs.remote_client import check_handoffs  # loads Prefect

        check_handoffs(workspace, params)


class _Run:
    """One run: what it has started and what it has heard."""

    def __init__(self, workspace: Path, params: Params, options: RunOptions, display: Display) -> None:
        self.workspace, self.params, self.options, self.display = workspace, params, options, display
        self.pools = params.pool_names()
        self.events: list[dict[str, Any]] = []
        self.restarts = 0
        self.reader = EventReader(new_events_file(workspace))
        self.flow: SupervisedProcess | None = None
        self.serving: PoolWorkers | None = None
        self.problem: str | None = None

    def execute(self) -> int:
        services = self._services()
        try:
            self._prepare(services)
            self.flow = self._start_flow()
            self._watch(services)
        except KeyboardInterrupt:
            signals.STOP.set()
        finally:
            stopped = signals.STOP.is_set()
            self._stop(services, stopped)
        return self._conclude(stopped)

    def _services(self) -> Services:
        url = use_server_of_environment()
        if url is None and (url := running_services(self.workspace)) is not None:
            os.environ["PREFECT_API_URL"] = url
            wait_for_other_server(url, signals.STOP.is_set)
            use_server_of_environment()
        if url is not None:
            self.display.line(f"Prefect server {url}")
            return Services(self.workspace, url, embedded=False)
        services = start_server(self.workspace, self.options.port)
        self.display.line(f"Prefect UI {services.api_url.removesuffix('/api')} (while this runs)")
        return services

    def _prepare(self, services: Services) -> None:
        """Wait for the server; pools, deployments and, where nobody else serves a pool, a worker."""
        from flows.jobs import deployments as deploy  # takes a second, in which the server starts
        from flows.prefect_server import automations  # takes a second, in which the server starts
        from flows.prefect_server import flow_runs as admin  # takes a second, in which the server starts
        from flows.prefect_server import workers as serving  # takes a second, in which the server starts

        if services.embedded:
            wait_for_server(services, signals.STOP.is_set)
            if swept := admin.end_stale_runs():
                self.display.line(f"marked {swept} unfinished Prefect runs of an earlier run as ended")
        elif not automations.has_zombie_automation():
            self.display.line("this server takes no automation: a run whose machine dies will keep its slot")
        deploy.deploy_jobs(self.workspace, self.params)
        self.serving = serving.PoolWorkers(services, self.params, self.pools)
        self.serving.start()
        self.serving.require()

    def _start_flow(self) -> SupervisedProcess:
        command = [sys.executable, "-m", "flows.pipeline.run_flow", str(self.workspace)]
        held = {LOCK_HELD_VARIABLE: os.environ[LOCK_HELD_VARIABLE], EVENTS_VARIABLE: str(self.reader.path)}
        return start_supervised(
            command if self.options.promote else [*command, "--no-promote"],
            name="flow",
            cwd=self.workspace,
            env=child_environment(self.workspace, **held),
            log=private_path(self.workspace, "logs", "flow.log"),
            grace=FLOW_GRACE,
        )

    def _watch(self, services: Services) -> None:
        """Until the flow ends or must be stopped."""
        assert self.flow is not None and self.serving is not None
        upkeep = ServerWatchdog(services, self.display.line)
        while self.flow.poll() is None and not signals.STOP.wait(TICK_SECONDS):
            self._hear()
            self.display.tick()
            self.problem = upkeep.look()
            for service in services.dead_beside_server():
                self.problem = self.problem or self._replace(services, service)
            if self.problem:
                return
            self.serving.keep()
        self._hear()

    def _hear(self) -> None:
        for event in self.reader.new():
            self.events.append(event)
            self.display.event(event)

    def _replace(self, services: Services, service: SupervisedProcess) -> str | None:
        """A dead worker took its job along: say so, free the slot, start another; or the problem that this is."""
        from flows.prefect_server import flow_runs as admin

        status = service.poll()
        pool = service.name.removeprefix(worker_name(""))
        if self.restarts >= WORKER_RESTARTS:
            return f"{service.name} ended (status {status}); see {private_path(self.workspace, 'logs')}"
        self.restarts += 1
        self.display.line(f"the worker of {pool} ended (status {status}), its job with it; starting another worker")
        admin.crash_pool_runs(pool, "the worker and its job were killed")
        services.start_worker(pool, self.params.pool_limit(pool))
        return None

    def _stop(self, services: Services, stopped: bool) -> None:
        if stopped:
            self.display.line("stopping")
        try:
            if self.flow is not None:
                killed = self.flow.stop()
                self._hear()
                if not stopped and not self.problem and not any(e["kind"] == "end" for e in self.events):
                    log = private_path(self.workspace, "logs", "flow.log")
                    self.problem = f"the pipeline process ended without a result (status {killed}); see {log}"
                if services.embedded and SERVER not in [s.name for s in services.dead()]:
                    self._rest(stopped)
        finally:
            services.stop()
            cleanup(self.workspace)

    def _rest(self, stopped: bool) -> None:
        from flows.prefect_server import flow_runs as admin

        try:
            admin.end_active_runs(stopped, "stopped by a signal" if stopped else "the pipeline process has ended")
        except Exception as error:  # the next start sweeps; the end of this run is not held up
            self.display.line(f"could not tell the Prefect server about the end ({type(error).__name__})")

    def _conclude(self, stopped: bool) -> int:
        for line in summary(self.workspace, self.events, self.display.watch.seconds):
            print(line, flush=True)
        if stopped:
            print("cancelled; the next `rlhf run` goes on from here", file=sys.stderr)
            return EXIT_INTERRUPTED
        if self.problem:
            print(f"rlhf: {self.problem}; `rlhf run` goes on from the last checkpoint", file=sys.stderr)
            return 1
        end = next(e for e in reversed(self.events) if e["kind"] == "end")
        code = exit_code(end["state"])
        words = f"{end['state']}: {end['message']}"
        print(words if code == 0 else f"rlhf: {words}", file=sys.stdout if code == 0 else sys.stderr)
        return code


def check_options(options: RunOptions) -> None:
    """``RlhfError`` for a port that goes with somebody else's server."""
    if options.port is not None and os.environ.get("PREFECT_API_URL"):
        raise RlhfError("--port is for the embedded server, but PREFECT_API_URL names another; use one of the two")
