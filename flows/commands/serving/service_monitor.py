"""Supervision of the services of a command: restart those that die, end their flow runs when the command ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flows.prefect_server import flow_runs
from flows.prefect_server.server_watchdog import ServerWatchdog
from flows.prefect_server.services import SERVER, WORKER_PREFIX, Services
from flows.prefect_server.workers import PoolWorkers
from flows.supervision.processes import SupervisedProcess
from flows.supervision.signals import STOP
from rlhf_core.config.loading.load import Params

RESTART_PAUSE_SECONDS = 1.0


class ServiceMonitor:
    """Keeps the Prefect server and a worker for each of ``pools`` running; ``report`` gets a line for each restart.

    At most ``worker_restarts`` workers are restarted. Other services, such as the MLflow UI, are not.
    """

    def __init__(
        self,
        services: Services,
        params: Params,
        pools: Sequence[str],
        report: Callable[[str], None],
        worker_restarts: int,
    ) -> None:
        self.services, self.params, self.report = services, params, report
        self.workers = PoolWorkers(services, params, pools)
        self.watchdog = ServerWatchdog(services, report)
        self.restarts_left = worker_restarts

    def check(self) -> str | None:
        """Restart what has died; return the problem if that failed or happened too often."""
        if problem := self.watchdog.check():
            return problem
        for service in self.services.dead():
            if service.name != SERVER and (problem := self._replace(service)):
                return problem
        self.workers.check()
        return None

    def _replace(self, service: SupervisedProcess) -> str | None:
        """Start another worker in place of a dead one, after freeing the pool slots of the jobs that died with it."""
        status = service.poll()
        if not service.name.startswith(WORKER_PREFIX):
            del self.services.running[service.name]
            self.report(f"{service.name} exited (status {status}); everything else keeps running")
            return None
        if self.restarts_left <= 0:
            return f"{service.name} exited (status {status}); see .rlhf/logs/{service.name}.log"
        self.restarts_left -= 1
        pool = service.name.removeprefix(WORKER_PREFIX)
        self.report(f"the worker of {pool} exited (status {status}), and its job with it; starting another worker")
        own = None if self.services.embedded else self.services.workspace
        flow_runs.crash_pool_runs(pool, "the worker and its job were killed", own)
        STOP.wait(RESTART_PAUSE_SECONDS)
        self.services.start_worker(pool, self.params.pool_limit(pool))
        return None


def end_active_runs(services: Services, cancelled: bool, message: str, report: Callable[[str], None]) -> None:
    """End the active flow runs on the embedded server, as Cancelled or Crashed; leave external servers alone."""
    if not services.embedded or any(service.name == SERVER for service in services.dead()):
        return
    try:
        flow_runs.end_active_runs(cancelled, message)
    except Exception as error:  # the next start ends them; the end of this command is not delayed
        report(f"the flow runs could not be ended on the Prefect server ({type(error).__name__})")
