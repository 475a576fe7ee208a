"""Workers for the pools that no other worker serves, at the start of a command and while it runs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import httpx

from flows.prefect_server.pools import is_served, needs_worker
from flows.prefect_server.services import Services, worker_name
from rlhf_core.config.loading.load import Params
from rlhf_core.errors import RlhfError

CHECK_SECONDS = 10.0


class PoolWorkers:
    """Keeps a worker for each of ``pools`` while ``services`` run.

    Heartbeats expire slowly, so a worker that has just ended still counts as online; the pools are therefore checked
    again from time to time.
    """

    def __init__(self, services: Services, params: Params, pools: Sequence[str]) -> None:
        self.services, self.params, self.pools = services, params, pools
        self.next_check = 0.0

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

    def require_remote(self) -> None:
        """Check that each pool whose workers run on other hosts has one.

        Raises:
            RlhfError: a pool has no worker, and one here could not replace it.
        """
        for pool in self.params.pools_away():
            if not is_served(pool):
                raise RlhfError(
                    f"no worker serves the work pool {pool}, and one here could not replace it (shared: false): "
                    "start one on a host of that pool, with PREFECT_API_URL set to this server (docs/operations.md)"
                )

    def check(self) -> None:
        """Repeat :meth:`start_missing` every ten seconds; what fails is tried again the next time."""
        if not self.services.embedded and time.monotonic() >= self.next_check:
            with contextlib.suppress(httpx.HTTPError, RlhfError):
                self.start_missing()
