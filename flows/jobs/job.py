"""A job: a stage for a work pool, with what its host needs, and the names under which the server knows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flows.prefect_server.pools import GPU_POOL
from rlhf_core.config.placement import Placement

JOB_FLOW = "rlhf-stage"


@dataclass(frozen=True)
class Handoff:
    """What a job needs to rebuild the workspace: ``files`` by their path in it, ``remote`` with the options that are no
    secret. ``key`` is the same for every attempt at one computation; ``revision`` of the code is for messages."""

    key: str
    remote: Mapping[str, str]
    files: Mapping[str, str]
    revision: str
    deliver_seconds: int

    def parameters(self) -> dict[str, Any]:
        """As a parameter of the job's flow run."""
        return asdict(self)


@dataclass(frozen=True)
class Job:
    """A stage to run on a pool.

    ``attempt`` is unique to this attempt of this pipeline run. ``stage_hash`` is the hash of what is to be computed
    (``flows.stage.stage_hash``), None where that cannot be shared. ``preemptions`` is how often the job may be
    preempted and submitted again. ``handoff`` is what workers need that do not see the workspace.
    """

    workspace: Path
    stage: str
    outputs: tuple[str, ...]
    environment: Mapping[str, str]
    grace: float
    placement: Placement
    attempt: str
    stage_hash: str | None = None
    preemptions: int = 100
    handoff: Handoff | None = None

    @property
    def tag(self) -> str:
        """Marks the flow runs of one computation on one pool."""
        return f"computes:{(self.stage_hash or self.attempt)[:32]}@{self.placement.pool}"


def job_name(pool: str, shared: bool = True) -> str:
    """Name of the job's deployment for ``pool``, whose workers see the workspace or do not."""
    if not shared:
        return f"handoff-{pool}"
    return "gpu-job" if pool == GPU_POOL else f"job-{pool}"


def job_deployment(pool: str, shared: bool = True) -> str:
    """What ``run_deployment`` is given: ``flow/deployment``."""
    return f"{JOB_FLOW}/{job_name(pool, shared)}"
