"""Requests to a pool are limited to what its base job template provides."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from prefect.client.schemas.objects import WorkPool
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound

from flows.prefect_server.pools import PROCESS_VARIABLES, check_requests, ensure_pool
from rlhf_core.config.loading import Params, check_params
from rlhf_core.errors import ConfigError


def pool(kind: str, *variables: str) -> WorkPool:
    template: dict[str, Any] = {"job_configuration": {}, "variables": {"properties": {name: {} for name in variables}}}
    return WorkPool(name="gpu-pool", type=kind, base_job_template=template if variables else {})


def params(**asked: object) -> Params:
    launch = {"ppo": {"processes": 8}}
    return check_params(
        {"pools": {"ppo": {"pool": "gpu-pool", **asked}, "sft": "other"}, "compute": {"launch": launch}}
    )


def test_a_request_that_would_be_ignored_is_refused_with_stage_and_pool() -> None:
    with pytest.raises(
        ConfigError, match=r"pools\.ppo asks for gpus, memory, which the work pool gpu-pool \(type proc"
    ):
        check_requests(pool("process"), params(gpus=8, memory="64Gi"))
    with pytest.raises(ConfigError, match=r"asks for gpus,"):
        check_requests(pool("kubernetes", "image", "memory"), params(gpus=8, memory="64Gi"))


def test_what_the_template_knows_may_be_asked_for() -> None:
    check_requests(pool("kubernetes", "gpus", "memory"), params(gpus=8, memory="64Gi"))
    check_requests(pool("process"), params(queue="long", variables={"working_dir": "/scratch"}))


def test_a_template_that_is_not_known_yet_is_trusted() -> None:
    check_requests(pool("kubernetes"), params(gpus=8))


def test_a_pool_that_another_run_makes_at_the_same_moment_is_taken_as_it_is() -> None:
    class Server:
        """A server on which the pool appears between the query and the attempt to create it."""

        asked = 0

        def read_work_pool(self, name: str) -> WorkPool:
            self.asked += 1
            if self.asked == 1:
                raise ObjectNotFound(refusal(404))
            return pool("process")

        def create_work_pool(self, _: object) -> WorkPool:
            raise ObjectAlreadyExists(refusal(409))

    assert ensure_pool(Server(), "gpu-pool", limit=1).name == "gpu-pool"  # type: ignore[arg-type]


def refusal(status: int) -> httpx.HTTPStatusError:
    request = httpx.Request("GET", "http://127.0.0.1")
    return httpx.HTTPStatusError("", request=request, response=httpx.Response(status, request=request))


def test_the_variables_of_process_pools_are_prefects_own() -> None:
    from prefect.workers.process import ProcessWorker

    assert set(ProcessWorker.get_default_base_job_template()["variables"]["properties"]) == PROCESS_VARIABLES
