"""A stage for workers that do not see the workspace: what its job is told, and what comes back.

Inputs and result go through the DVC remote (``flows.jobs.transfer_worker``). Recipe, lock file and the few small inputs
that DVC does not keep go with the submission; the outcome and the log come back through the Prefect server.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect import get_run_logger
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, ArtifactFilterType
from prefect.client.schemas.sorting import ArtifactSort

from flows.dvc_repo.graph import StageNode
from flows.jobs.job import Handoff, Job
from flows.jobs.log_shipping import LogFollower
from flows.jobs.transfer import TransferFailed, TransferStopped, patiently, transfer
from flows.stage.outcome import StageOutcome
from flows.stage.run import run_stage, stage_log
from flows.stage.stage_hash import stage_hash
from flows.workspace.git import git_revision
from rlhf_core.cli import reward_function_files
from rlhf_core.config.loading.load import PARAMS_FILE, Params, load_params
from rlhf_core.config.placement import Placement
from rlhf_core.errors import EXIT_INTERRUPTED, EXIT_USER_ERROR, ConfigError
from rlhf_core.files import atomic_write_text

RECIPE_FILES = (PARAMS_FILE, "dvc.yaml", "dvc.lock", ".dvcignore")
CARRIED_BYTES = 400_000
DELIVER_SECONDS = 300
REPORT = "rlhf-outcome"
SCORED_STAGES = ("critic", "ppo")


def check_handoffs(workspace: Path, params: Params) -> None:
    """``ConfigError`` when a stage is placed on a pool that does not see the workspace, and no remote can serve it."""
    for remote, stage in {place.remote: stage for stage, place in params.pools.items() if not place.shared}.items():
        try:
            transfer(workspace, "describe", remote=remote or "")
        except TransferFailed as failure:
            raise ConfigError(f"pools.{stage} has shared: false, but {failure} (docs/operations.md)") from failure
        except TransferStopped as stop:
            raise KeyboardInterrupt from stop


def prepare_remote_job(job: Job, node: StageNode) -> Job | None:
    """``job`` with what its host needs, its inputs being pushed first; None when the result is in the cache already.

    Raises :class:`TransferFailed` and :class:`TransferStopped`.
    """
    if not node.shareable:
        raise TransferFailed(
            "DVC's run cache does not take this stage (frozen, always changed, or with persisted outputs), so its "
            "result cannot come back: place it on a pool that sees the workspace",
            final=True,
        )
    place = job.placement
    offer = transfer(job.workspace, "offer", job.stage, place.remote or "")
    if offer["done"]:
        return None
    remote = offer["remote"]
    same = stage_hash(job.workspace, replace(node, cache=remote["url"]))
    if same is None:
        raise TransferFailed("an input is missing; run the stages before it", final=True)
    handoff = Handoff(
        key=f"{job.stage}-{same[:16]}",
        remote=remote,
        files=_carried(job.workspace, [*RECIPE_FILES, *offer["carry"], *_files_beside_dvc(job.workspace, job.stage)]),
        revision=git_revision(Path(__file__).parent),
        deliver_seconds=deliver_seconds(place),
    )
    return replace(job, stage_hash=same, handoff=handoff)


def deliver_seconds(place: Placement) -> int:
    """How long the remote may be out of reach before a job gives up."""
    return DELIVER_SECONDS if place.deliver_seconds is None else place.deliver_seconds


def _files_beside_dvc(workspace: Path, stage: str) -> list[str]:
    """Files that the stage reads though they are no inputs of it: how to launch it, and functions that score."""
    launches = {str(name): launch for name, launch in load_params(workspace).compute.launch.items()}
    file = launches[stage].deepspeed if stage in launches else None
    engine = [file] if file and not Path(file).is_absolute() else []
    return [*engine, *(reward_function_files(workspace) if stage in SCORED_STAGES else [])]


def _carried(workspace: Path, paths: list[str]) -> dict[str, str]:
    """Content of files and folders by path; :class:`TransferFailed` for what is too large or no text."""
    texts: dict[str, str] = {}
    for path in dict.fromkeys(paths):
        place = workspace / path
        for file in sorted(place.rglob("*")) if place.is_dir() else [place]:
            if file.is_file():
                texts[file.relative_to(workspace).as_posix()] = _text(file, path)
    total = sum(len(text.encode()) for text in texts.values())
    if total > CARRIED_BYTES:
        largest = max(texts, key=lambda path: len(texts[path]))
        raise TransferFailed(
            f"the inputs that DVC does not keep come to {total} bytes, above {CARRIED_BYTES} (the largest is "
            f"{largest}): track it with `dvc add`, or make it a cached output",
            final=True,
        )
    return texts


def _text(file: Path, path: str) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TransferFailed(
            f"{path} is an input that DVC does not keep, and no text: track it with `dvc add`", final=True
        ) from error


class RemoteJobClient:
    """The caller's side of one job: its log while it runs, its outcome and result when it has ended."""

    def __init__(self, job: Job, client: SyncPrefectClient, run: UUID) -> None:
        self.job, self.client, self.run = job, client, run
        self.follower = LogFollower(stage_log(job.workspace, job.stage))

    def listen(self, watch: Callable[[], None]) -> None:
        """Write down what the stage has said since, then look at it."""
        self.follower.look(self.client, self.run)
        watch()

    def receive(self) -> StageOutcome | None:
        """What the job reported, its result fetched; None if it ended without a word or was stopped."""
        self.follower.look(self.client, self.run, now=True)
        wanted = ArtifactFilter(
            flow_run_id=ArtifactFilterFlowRunId(any_=[self.run]), type=ArtifactFilterType(any_=[REPORT])
        )
        found = self.client.read_artifacts(artifact_filter=wanted, sort=ArtifactSort.UPDATED_DESC, limit=1)
        if not found:
            return None
        report: Any = found[0].data
        outcome = StageOutcome(**report["outcome"])
        if outcome.ok:
            return self._fetch(outcome)
        if outcome.action == "stopped":
            return None
        for path, text in report["files"].items():
            if path in self.job.outputs:
                atomic_write_text(self.job.workspace / path, text)
        return outcome

    def _fetch(self, reported: StageOutcome) -> StageOutcome:
        """The result into the cache, then DVC's own ``repro``, which finds it there; never a computation here."""
        job = self.job
        assert job.handoff is not None
        remote = job.handoff.remote["name"]
        try:
            found = patiently(
                lambda: transfer(job.workspace, "bring", job.stage, remote),
                job.handoff.deliver_seconds,
                get_run_logger().warning,
            )["found"]
        except (TransferFailed, TransferStopped) as problem:
            return failed(
                job.stage,
                problem,
                f"the result is in the DVC remote {remote}, but could not be fetched",
                reported.started,
            )
        if not found:
            message = f"the DVC remote {remote} does not have the result for the inputs as they are here now"
            return replace(reported, action="failed", exit_code=1, message=message, ended=time.time())
        outcome = run_stage(job.workspace, job.stage, job.outputs, job.environment, job.grace)
        started = min(reported.started, outcome.started)  # the other host's clock may be ahead
        return replace(outcome, action=reported.action, started=started, work=reported.work) if outcome.ok else outcome


def failed(stage: str, problem: TransferFailed | TransferStopped, where: str, started: float) -> StageOutcome:
    """The outcome of a stage whose inputs or result did not get through."""
    ended = time.time()
    if isinstance(problem, TransferStopped):
        return StageOutcome(stage, "stopped", EXIT_INTERRUPTED, "stopped", started, ended, 0.0)
    code = EXIT_USER_ERROR if problem.final else 1
    message = f"{where}: {problem}" if where else str(problem)
    return StageOutcome(stage, "failed", code, message, started, ended, 0.0)
