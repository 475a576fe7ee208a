"""Workers for pools that nobody serves: when a run or `rlhf up` starts, and whenever somebody else's worker goes."""

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
    """The pools that must be served while ``services`` run. A worker counts as there until its heartbeats have been
    missing for a while, so one that has just ended may be seen at the start: hence the later looks."""

    def __init__(self, services: Services, params: Params, pools: Sequence[str]) -> None:
        self.services, self.params, self.pools = services, params, pools
        self.next_look = 0.0

    def start(self) -> None:
        """A worker for each unserved pool; ``RlhfError`` if one cannot be served by a process here."""
        self.next_look = time.monotonic() + CHECK_SECONDS
        for pool in sorted({*self.pools} - {*self.params.pools_away()}):
            mine = worker_name(pool) in self.services.running
            if not mine and (self.services.embedded or needs_worker(pool)):
                self.services.start_worker(pool, self.params.pool_limit(pool))

    def require(self) -> None:
        """``RlhfError`` for a pool that only workers on other hosts can serve, while none of them is there."""
        for pool in self.params.pools_away():
            if not is_served(pool):
                raise RlhfError(
                    f"no worker serves the work pool {pool}, and one here could not stand in for it (shared: false): "
                    "start one on a host of that pool, with PREFECT_API_URL set to this server (docs/operations.md)"
                )

    def keep(self) -> None:
        """The same from time to time; a server that does not answer, or a pool of another type, is waited for."""
        if not self.services.embedded and time.monotonic() >= self.next_look:
            with contextlib.suppress(httpx.HTTPError, RlhfError):
                self.start()
