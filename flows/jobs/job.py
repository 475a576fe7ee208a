"""A job: a stage to run on a work pool, what its host needs for it, and the names by which the server knows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flows.prefect_server.pools import GPU_POOL
from flows.stage.outcome import StageOutcome
from flows.stage.run import StageSpec
from rlhf_core.config.operations.placement import Placement

JOB_FLOW = "rlhf-stage"


@dataclass(frozen=True)
class Handoff:
    """What a host that does not see the workspace needs to rebuild it.

    Attributes:
        key: the same for every attempt at one computation.
        remote: the DVC remote: its name and those of its options that are no secret.
        files: the contents of small text files by their path in the workspace.
        revision: the git revision of the code, for messages.
        deliver_seconds: how long the job tries to reach the remote.
    """

    key: str
    remote: Mapping[str, str]
    files: Mapping[str, str]
    revision: str
    deliver_seconds: int

    def parameters(self) -> dict[str, Any]:
        """Return the hand-off as a parameter of the job's flow run."""
        return asdict(self)


@dataclass(frozen=True)
class Job:
    """A stage to run on a pool.

    Attributes:
        attempt: an id of this attempt in this pipeline run.
        stage_hash: the hash of what is computed (``flows.stage.stage_hash``), None where it cannot be shared.
        max_preemptions: how often the job may be preempted and submitted again.
        handoff: for workers that do not see the workspace.
    """

    spec: StageSpec
    placement: Placement
    attempt: str
    stage_hash: str | None = None
    max_preemptions: int = 100
    handoff: Handoff | None = None

    @property
    def stage(self) -> str:
        """The name of the stage."""
        return self.spec.name

    @property
    def workspace(self) -> Path:
        """The workspace of the pipeline that submits the job."""
        return self.spec.workspace

    @property
    def tag(self) -> str:
        """The tag that all flow runs of one computation on one pool have."""
        return f"computes:{(self.stage_hash or self.attempt)[:32]}@{self.placement.pool}"


@dataclass(frozen=True)
class RemoteJobReport:
    """How a job ended on a host that does not see the workspace; travels as an artifact of the flow run.

    ``files`` are the contents of small text outputs by path, for a gate that did not pass.
    """

    outcome: StageOutcome
    host: str
    folder: str
    files: Mapping[str, str]

    def to_data(self) -> dict[str, Any]:
        """Return the report as JSON data."""
        return asdict(self)

    @classmethod
    def from_data(cls, data: Any) -> RemoteJobReport:
        """Return the report from what :meth:`to_data` made."""
        return cls(**{**data, "outcome": StageOutcome(**data["outcome"])})


def job_name(pool: str, shared: bool = True) -> str:
    """Return the name of the job deployment for ``pool``, whose workers see the workspace (``shared``) or do not."""
    if not shared:
        return f"handoff-{pool}"
    return "gpu-job" if pool == GPU_POOL else f"job-{pool}"


def job_deployment(pool: str, shared: bool = True) -> str:
    """Return the deployment's full name, as ``run_deployment`` takes it."""
    return f"{JOB_FLOW}/{job_name(pool, shared)}"
