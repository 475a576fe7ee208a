"""``rlhf run``: start services, run the flow in a child process, summarise, stop everything."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from flows.commands.display import LONGEST_FAILURE, Display, open_display
from flows.commands.doctor import require_ready
from flows.commands.run_state import EXIT_CODES, print_verdict, summary
from flows.commands.text import print_failed_gates, print_line
from flows.dvc_repo.inputs import refresh_inputs
from flows.dvc_repo.recipe import check_recipe
from flows.dvc_repo.root import ensure_dvc
from flows.pipeline.events import EventLog, RunTimed, new_events_file
from flows.pipeline.preflight import SCRATCH, find_unchanged, open_starting_model
from flows.prefect_server.services import Services, known_url, open_services, wait_for_server
from flows.registry.policies import active_policies
from flows.supervision import signals
from flows.supervision.processes import SupervisedProcess
from flows.workspace import LOCK_HELD_VARIABLE, cleanup, locked, private_path
from rlhf_core.config.loading import load_params
from rlhf_core.config.params import Params
from rlhf_core.errors import EXIT_GATE_FAILED, EXIT_INTERRUPTED, RlhfError, cannot_write
from rlhf_core.storage.garbage_collection import skip_last_collection

if TYPE_CHECKING:
    from flows.prefect_server.monitor import ServiceMonitor

FLOW_GRACE = 8.0
WORKER_RESTARTS = 3
POLL_SECONDS = 0.1
SAID_NO = "The pipeline did its work, and a gate said no (exit code 3): what it judged is not released. It found:"
CANNOT_WRITE = (errno.ENOSPC, errno.EROFS)


def run(workspace: Path, promote: bool = True, wait: bool = False, port: int | None = None) -> int:
    """Run the pipeline of ``workspace`` and return the exit status.

    Raises:
        RlhfError: the run cannot be started; nothing has been run.
    """
    signals.install()
    skip_last_collection()
    params = load_params(workspace)
    check_recipe(workspace)
    try:
        with (
            open_display(workspace, "preparing the workspace") as display,
            locked(workspace, wait=wait, on_wait=display.phase) as lock,
        ):
            display.phase("preparing the workspace")
            ensure_dvc(workspace)
            require_ready(workspace)
            for policy in active_policies(params.registry):
                policy.before_run(workspace, params.registry)
            for line in cleanup(workspace):
                display.line(line)
            display.phase("looking at code and data")
            refresh_inputs(workspace)
            _check_remote_pools(workspace, params)
            return PipelineRun(workspace, params, promote, display, lock).execute(port)
    except OSError as error:
        if isinstance(error, PermissionError) or error.errno in CANNOT_WRITE:
            raise cannot_write(workspace, error) from error
        raise


def _check_remote_pools(workspace: Path, params: Params) -> None:
    """Check that stages on other hosts reach a Prefect server, a DVC remote and their inputs.

    Raises:
        RlhfError: no lasting server is set, a remote cannot serve two hosts, or a stage cannot
            travel.
    """
    remote_pools = params.pools_away()
    if not remote_pools:
        return
    url = known_url(workspace)
    if not url:
        raise RlhfError(
            f"the work pool {remote_pools[0]} is served by other hosts (shared: false), which need a lasting server: "
            "start one and set PREFECT_API_URL (docs/operations.md)"
        )
    os.environ["PREFECT_API_URL"] = url  # which Prefect reads when it is loaded
    from flows.jobs.remote import check_remote_stages

    check_remote_stages(workspace, params)


class PipelineRun:
    """One run of the pipeline: the services and the flow process that it started."""

    def __init__(
        self, workspace: Path, params: Params, promote: bool, display: Display, lock: int
    ) -> None:
        self.workspace, self.params, self.promote = workspace, params, promote
        self.display, self.lock = display, lock
        self.events = EventLog(new_events_file(workspace))
        self.flow: SupervisedProcess | None = None
        self.problem: str | None = None

    def execute(self, port: int | None) -> int:
        """Run to the end and return the exit status; whatever was started is stopped.

        If there is nothing to do, no service is started, and neither Prefect nor MLflow gets a run.
        """
        if (unchanged := find_unchanged(self.workspace, promotes=self.promote)) is not None:
            unchanged.emit(self.events)
            self._show_new_events()
            return self._print_result(stopped=False)
        if self.params.base.source != SCRATCH:
            self.display.phase("opening the starting model")
            if note := open_starting_model(self.workspace, self.params):
                self.display.line(note)
        self.display.phase("starting Prefect")
        services = open_services(self.workspace, port, self.display.line, self.lock)
        if services.embedded:
            self.display.line(f"Prefect UI {services.ui_url} (while this runs)")
        try:
            monitor = self._prepare(services)
            if not signals.STOP.is_set():
                self.display.phase("reading the stages")
                self.flow = self._start_flow(services)
                self._watch(self.flow, monitor)
        except KeyboardInterrupt:
            signals.STOP.set()
        finally:
            stopped = signals.STOP.is_set()
            self._stop(services, stopped)
        return self._print_result(stopped)

    def _prepare(self, services: Services) -> ServiceMonitor:
        """Wait for the server, then set up work pools, deployments and workers."""
        # Imported here: loading Prefect takes a second, while the server starts.
        from flows.jobs.deployments import deploy_jobs
        from flows.prefect_server.flow_runs import end_stale_runs, ensure_zombie_automation
        from flows.prefect_server.monitor import ServiceMonitor
        from flows.prefect_server.pools import idle_workers

        if services.embedded:
            wait_for_server(services)
            if ended := end_stale_runs():
                self.display.line(
                    f"marked {ended} unfinished Prefect runs of an earlier run as ended"
                )
        else:
            ensure_zombie_automation(self.display.line)
        self.display.phase("starting workers" if self.params.pools else "setting up the pipeline")
        deploy_jobs(self.workspace, self.params)
        pools = self.params.pool_names()
        monitor = ServiceMonitor(services, self.params, pools, self.display.line, WORKER_RESTARTS)
        monitor.start_missing()
        monitor.require_remote()
        if not services.embedded:
            for line in idle_workers(self.params):
                self.display.line(line)
        return monitor

    def _start_flow(self, services: Services) -> SupervisedProcess:
        """Start the process of the flow."""
        command = [sys.executable, "-m", "flows.pipeline.flow", str(self.workspace)]
        variables = {LOCK_HELD_VARIABLE: str(self.workspace), **services.client_settings}
        command += [] if self.promote else ["--no-promote"]
        return services.launch("flow", command, FLOW_GRACE, "TERM", **variables)

    def _watch(self, flow: SupervisedProcess, monitor: ServiceMonitor) -> None:
        """Show events and keep the services running until the flow ends or is stopped."""
        while flow.poll() is None and self.problem is None and not signals.STOP.wait(POLL_SECONDS):
            self.display.state.own_pools = monitor.pools_here()
            self._show_new_events()
            self.display.tick()
            self.problem = monitor.check()
        self._show_new_events()

    def _show_new_events(self) -> None:
        for event in self.events.read_new():
            self.display.event(event)

    def _stop(self, services: Services, stopped: bool) -> None:
        self.display.phase("stopping" if stopped else "stopping the services")
        try:
            if self.flow is not None:
                from flows.prefect_server.monitor import end_active_runs

                status = self.flow.stop()
                self._show_new_events()
                if not stopped and not self.problem and self.display.state.end is None:
                    log = private_path(self.workspace, "logs", "flow.log")
                    self.problem = (
                        f"the pipeline process exited without a result (status {status}); see {log}"
                    )
                message = "stopped by a signal" if stopped else "the pipeline process has ended"
                end_active_runs(services, stopped, message, self.display.line)
        finally:
            services.stop()
            cleanup(self.workspace)

    def _print_result(self, stopped: bool) -> int:
        """Print summary, final state and verdict; return the exit status."""
        self.display.close()
        state, told, seconds = self.display.state, "", self.display.watch.seconds
        gate = state.verdict.gate if state.verdict is not None else None
        closed = gate is not None and not gate.opens  # which the verdict tells
        failed = [outcome for outcome in state.outcomes if outcome.action == "failed"]
        with suppress(OSError):  # of a full disk, of which the run's own end tells
            self.events.emit(RunTimed(seconds))
        for line in summary(state, seconds):
            print_line(line, sys.stdout)
        if stopped:
            code = EXIT_INTERRUPTED
            _complain("cancelled; the next `rlhf run` resumes from here")
        elif self.problem or state.end is None:
            code = 1
            _complain(f"rlhf: {self.problem}; `rlhf run` resumes from the last checkpoint")
        else:
            code = EXIT_CODES.get(state.end.state, 1)
            result = f"{state.end.state}: {state.end.message}"
            if closed:
                _complain(SAID_NO)
            elif code == 0:
                print_line(result, sys.stdout)
            else:
                _complain(f"rlhf: {result}")
                told = f"{failed[0].stage} failed, see above" if failed else ""
            if code == EXIT_GATE_FAILED:
                print_failed_gates(self.workspace, sys.stderr, advice=not closed)
        # What the display has cut off: of several stages, or of a run that did not end by itself.
        ended = state.end.message if state.end is not None else ""
        for outcome in failed:
            failure = state.stages[outcome.stage].result
            by_gate = closed and outcome.exit_code == EXIT_GATE_FAILED
            if not by_gate and len(failure) > LONGEST_FAILURE and failure not in ended:
                _complain(f"rlhf: {outcome.stage} failed: {failure}")
        if state.verdict is not None:
            print_verdict(state.verdict, self.workspace, told)
        return code


def _complain(line: str) -> None:
    print_line(line, sys.stderr)
