"""A job: a stage to run on a work pool, what its host needs for it, and the names by which the
server knows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flows.prefect_server.pools import GPU_POOL
from flows.stage import StageSpec
from flows.workspace import workspace_slug
from rlhf_core.config.operations import Placement

JOB_FLOW = "rlhf-stage"


@dataclass(frozen=True)
class Handoff:
    """What a host that does not see the workspace needs to rebuild it.

    Attributes:
        key: names the workspace on the other host; the same for every attempt at the stage.
        remote: the DVC remote: its name and those of its options that are no secret.
        inputs: what to pull from it, as paths in the workspace.
        files: the contents of small text files by their path in the workspace.
        revision: the git revision of the code, for messages.
        deliver_seconds: how long the job tries to reach the remote.
    """

    key: str
    remote: Mapping[str, str]
    inputs: Sequence[str]
    files: Mapping[str, str]
    revision: str
    deliver_seconds: int


@dataclass(frozen=True)
class Job:
    """A stage to run on a pool.

    Attributes:
        attempt: an id of this attempt in this pipeline run.
        max_preemptions: how often the job may be preempted and submitted again.
        handoff: for workers that do not see the workspace.
    """

    spec: StageSpec
    placement: Placement
    attempt: str
    max_preemptions: int = 100
    handoff: Handoff | None = None


def job_name(workspace: Path, pool: str, shared: bool) -> str:
    """Return the name of the job deployment for ``pool``, whose workers see the workspace
    (``shared``) or do not.
    """
    kind = f"job-{pool}" if shared else f"handoff-{pool}"
    if shared and pool == GPU_POOL:
        kind = "gpu-job"
    return f"{kind}-{workspace_slug(workspace)}"
