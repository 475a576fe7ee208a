"""A pool without a worker gets one, also when its worker ends in the middle of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import httpx
import pytest

from flows.prefect_server import monitor as workers
from flows.prefect_server.monitor import ServiceMonitor
from flows.prefect_server.services import Services
from rlhf_core.config.loading import check_params
from rlhf_core.errors import RlhfError

PARAMS = check_params({"pools": {"ppo": "cluster", "sft": "gpu-pool"}, "work_pools": {"gpu-pool": {"limit": 3}}})


@dataclass
class Started:
    """Stands in for the services and records which workers are started."""

    embedded: bool = False
    running: dict[str, int] = field(default_factory=dict)

    def dead(self) -> list[Any]:
        return []

    def start_worker(self, pool: str, limit: int) -> None:
        self.running[f"worker-{pool}"] = limit


class Server:
    """The server's view: which pools have a worker, and which errors it answers with."""

    def __init__(self, *served: str) -> None:
        self.served, self.error = set(served), cast("Exception | None", None)

    def needs_worker(self, pool: str) -> bool:
        if self.error is not None:
            raise self.error
        return pool not in self.served


def make(
    monkeypatch: pytest.MonkeyPatch, server: Server, clock: list[float], **services: Any
) -> tuple[ServiceMonitor, Started]:
    monkeypatch.setattr(workers, "needs_worker", server.needs_worker)
    monkeypatch.setattr(workers.time, "monotonic", lambda: clock[0])
    started = Started(**services)
    return ServiceMonitor(cast(Services, started), PARAMS, PARAMS.pool_names(), print, 0), started


def test_only_pools_without_a_worker_get_one_and_with_their_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    served, started = make(monkeypatch, Server("cluster"), [0.0])
    served.start_missing()
    assert started.running == {"worker-gpu-pool": 3}


def test_a_worker_that_ends_later_is_replaced_at_the_next_check(monkeypatch: pytest.MonkeyPatch) -> None:
    server, clock = Server("cluster", "gpu-pool"), [0.0]
    served, started = make(monkeypatch, server, clock)
    served.start_missing()
    server.served.clear()
    served.check()
    assert started.running == {}  # not checked every time
    clock[0] = workers.CHECK_SECONDS
    served.check()
    assert set(started.running) == {"worker-cluster", "worker-gpu-pool"}


@pytest.mark.parametrize(
    "error", [httpx.ConnectError("down"), RlhfError("no worker serves the pool of type kubernetes")]
)
def test_errors_at_a_later_check_end_nothing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    server, clock = Server(), [0.0]
    served, started = make(monkeypatch, server, clock)
    server.error, clock[0] = error, 100.0
    served.check()
    assert started.running == {}
    with pytest.raises(type(error)):
        served.start_missing()


def test_the_embedded_server_has_no_other_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    server.error = AssertionError("not asked")
    served, started = make(monkeypatch, server, [0.0], embedded=True)
    served.start_missing()
    assert set(started.running) == {"worker-cluster", "worker-gpu-pool"}
