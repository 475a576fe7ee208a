"""Supervision of the services of a command: restart those that die, serve every pool, end flow runs
at the end.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

import httpx
from prefect.client.schemas.objects import StateType
from prefect.states import Cancelled, Crashed

from flows.prefect_server import flow_runs
from flows.prefect_server.pools import needs_worker, online_workers
from flows.prefect_server.services import (
    SERVER,
    WORKER_PREFIX,
    Services,
    restart_server,
    worker_name,
)
from flows.supervision.processes import SupervisedProcess
from flows.supervision.signals import STOP, WallClock
from rlhf_core.config.params import Params
from rlhf_core.errors import RlhfError

SERVER_RESTARTS = 3
CHECK_SECONDS = 10.0
RESTART_PAUSE_SECONDS = 1.0


class ServiceMonitor:
    """Keeps the Prefect server and a worker for each of ``pools`` running; ``report`` gets a line
    for each restart.

    An external server is left alone, but a pool that loses its worker there gets another one. At
    most ``worker_restarts`` workers are restarted. Other services, such as the MLflow UI, are not.
    """

    def __init__(
        self,
        services: Services,
        params: Params,
        pools: Sequence[str],
        report: Callable[[str], None],
        worker_restarts: int,
    ) -> None:
        self.services, self.params, self.pools, self.report = services, params, pools, report
        self.clock = WallClock()
        self.server_restarts, self.worker_restarts = SERVER_RESTARTS, worker_restarts
        self.next_check = 0.0
        # Pools whose worker has died while the server was away.
        self.waiting: set[str] = set()

    def start_missing(self) -> None:
        """Start a worker for each pool without one.

        Raises:
            RlhfError: a pool needs a worker that cannot run here.
        """
        self.next_check = time.monotonic() + CHECK_SECONDS
        for pool in sorted({*self.pools} - {*self.params.pools_away()}):
            started_here = worker_name(pool) in self.services.running
            if not started_here and (self.services.embedded or needs_worker(pool)):
                self.services.start_worker(pool, self.params.pool_limit(pool))

    def pools_here(self) -> list[str]:
        """Return the pools whose jobs a worker of these services takes."""
        return [pool for pool in self.pools if worker_name(pool) in self.services.running]

    def require_remote(self) -> None:
        """Check that each pool whose workers run on other hosts has one.

        Raises:
            RlhfError: a pool has no worker, and one here could not replace it.
        """
        for pool in self.params.pools_away():
            if not online_workers(pool):
                raise RlhfError(
                    f"no worker serves the work pool {pool}, and one here could not replace it (shared: false): "
                    "start one on a host of that pool, with PREFECT_API_URL set to this server (docs/operations.md)"
                )

    def check(self) -> str | None:
        """Restart what has died; return the problem if that failed or happened too often."""
        if self.services.embedded and (problem := self._check_server()):
            return problem
        for service in self.services.dead():
            if service.name != SERVER and (problem := self._replace(service)):
                return problem
        # Heartbeats expire slowly, so that a worker that has just ended still counts as online:
        # look again later.
        if not self.services.embedded and time.monotonic() >= self.next_check:
            with contextlib.suppress(httpx.HTTPError, RlhfError):
                self.start_missing()
        return None

    def _check_server(self) -> str | None:
        """Restart the embedded server if it died or the clock was set back; return the problem if
        that was in vain.

        Prefect's server schedules its own work (schedules, late runs, automations) by the wall
        clock: set back by hours, it does none of that for as long, and was once seen to stop
        responding altogether.
        """
        status = self.services.running[SERVER].poll()
        seconds = self.clock.seconds_set_back()
        if status is None and not seconds:
            return None
        reason = f"the clock was set back by {seconds:.0f} s, which stalls the Prefect server"
        if status is not None:
            reason = f"the Prefect server exited (status {status})"
        if not self.server_restarts:
            return f"{reason}, for the {SERVER_RESTARTS + 1}th time; see .rlhf/logs/{SERVER}.log"
        self.server_restarts -= 1
        self.report(f"{reason}; restarting it")
        try:
            restart_server(self.services)
        except RlhfError as error:
            return str(error)
        return None

    def _replace(self, service: SupervisedProcess) -> str | None:
        """Start another worker in place of a dead one, after freeing the pool slots of the jobs
        that died with it.
        """
        status = service.poll()
        if not service.name.startswith(WORKER_PREFIX):
            del self.services.running[service.name]
            self.report(f"{service.name} exited (status {status}); everything else keeps running")
            return None
        if self.worker_restarts <= 0:
            return f"{service.name} exited (status {status}); see .rlhf/logs/{service.name}.log"
        pool = service.name.removeprefix(WORKER_PREFIX)
        ended = f"the worker of {pool} exited (status {status}), and its job with it"
        own = None if self.services.embedded else self.services.workspace
        try:
            flow_runs.crash_pool_runs(pool, "the worker and its job were killed", own)
        except httpx.HTTPError:
            if pool not in self.waiting:
                self.report(f"{ended}; another starts when the Prefect server answers")
            self.waiting.add(pool)
            return None
        self.waiting.discard(pool)
        self.worker_restarts -= 1
        self.report(f"{ended}; starting another worker")
        STOP.wait(RESTART_PAUSE_SECONDS)
        self.services.start_worker(pool, self.params.pool_limit(pool))
        return None


def end_active_runs(
    services: Services, cancelled: bool, message: str, report: Callable[[str], None]
) -> None:
    """End the active flow runs on the embedded server, whose processes have ended; leave external
    servers alone.

    As Cancelled if a person stopped them, else as Crashed.
    """
    if not services.embedded or any(service.name == SERVER for service in services.dead()):
        return
    state = Cancelled if cancelled else Crashed
    try:
        flow_runs.end_runs(
            [*flow_runs.ACTIVE, StateType.SCHEDULED],
            lambda run: None if run.auto_scheduled else state(message=message),
        )
    except Exception as error:  # the next start ends them; the end of this command is not delayed
        report(f"the flow runs could not be ended on the Prefect server ({type(error).__name__})")
