"""The pipeline's side of a stage on a host that does not see the workspace.

Inputs and result travel through the DVC remote (``flows.jobs.transfer``). The recipe, dvc.lock and the small
inputs that DVC does not cache travel with the submission; outcome and log come back through the Prefect server.
"""

from __future__ import annotations

import hashlib
import shutil
import socket
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any
from uuid import UUID

from prefect import get_run_logger
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, ArtifactFilterType
from prefect.client.schemas.sorting import ArtifactSort

from flows.dvc_repo.graph import StageNode
from flows.dvc_repo.lock_file import LOCK_FILE
from flows.dvc_repo.root import cache_of
from flows.jobs.job import Handoff, Job
from flows.jobs.transfer import (
    TransferFailed,
    describe_remote,
    dvc_transfer,
    restore_result,
    transfer_outcome,
)
from flows.stage.outcome import StageOutcome
from flows.supervision.signals import StopRequested
from flows.workspace.folder import private_path
from rlhf_core.config.loading import PARAMS_FILE, Params, load_params
from rlhf_core.errors import ConfigError
from rlhf_core.fingerprint.tracked_files import function_files, verifiable_functions
from rlhf_core.git import git_revision
from rlhf_core.storage.files import atomic_write_text

RECIPE_FILES = (PARAMS_FILE, "dvc.yaml", "dvc.lock", ".dvcignore")
CARRIED_BYTES = 400_000
DELIVER_SECONDS = 300
REPORT_ARTIFACT = "rlhf-outcome"
STAGES_WITH_REWARD_SOURCES = ("critic", "ppo")


def check_remotes(workspace: Path, params: Params) -> None:
    """Check the DVC remote of every stage that is placed on a pool whose workers do not see the workspace.

    Raises:
        ConfigError: a remote is missing or of a kind that cannot serve two hosts.
    """
    remotes = {placement.remote: stage for stage, placement in params.pools.items() if not placement.shared}
    for remote, stage in remotes.items():
        try:
            describe_remote(workspace, remote)
        except TransferFailed as error:
            raise ConfigError(f"pools.{stage} has shared: false, but {error} (docs/operations.md)") from error


def prepare_remote_job(job: Job, node: StageNode) -> Job:
    """Push the inputs of ``job`` and return it with all its host needs.

    Raises:
        TransferFailed: the stage cannot travel, or the remote is out of reach.
        StopRequested: the stop flag was raised.
    """
    workspace, stage = job.spec.workspace, job.spec.name
    if not node.shareable:
        raise TransferFailed(
            "DVC's run cache does not take this stage (frozen, always changed, or with outputs that are persisted or "
            "not cached), so its result cannot come back: place it on a pool that sees the workspace",
            final=True,
        )
    outside = next((path for path in (*node.cached_inputs, *node.carried_inputs) if path.startswith("..")), None)
    if outside is not None:
        raise TransferFailed(
            f"{node.name} reads {outside}, which is outside the workspace: `dvc add` a copy in it", final=True
        )
    remote = describe_remote(workspace, job.placement.remote)
    if node.cached_inputs:
        dvc_transfer(workspace, ("push", "--remote", remote["name"], *node.cached_inputs))
    carried = [*RECIPE_FILES, *node.carried_inputs, *_untracked_inputs(workspace, stage)]
    handoff = Handoff(
        key=f"{stage}-{hashlib.sha256(f'{socket.gethostname()} {workspace}'.encode()).hexdigest()[:16]}",
        remote=remote,
        inputs=node.cached_inputs,
        files=read_carried_files(workspace, carried),
        revision=git_revision(Path(__file__).parent),
        deliver_seconds=job.placement.deliver_seconds or DELIVER_SECONDS,
    )
    return replace(job, handoff=handoff)


def _untracked_inputs(workspace: Path, stage: str) -> list[str]:
    """List files that the stage reads and dvc.yaml does not name: DeepSpeed settings and functions."""
    params = load_params(workspace)
    launch = {str(name): config for name, config in params.compute.launch.items()}.get(stage)
    files = [launch.deepspeed] if launch and launch.deepspeed and not Path(launch.deepspeed).is_absolute() else []
    if stage in STAGES_WITH_REWARD_SOURCES:
        files += function_files(workspace, params.ppo.reward.sources)
    if stage == "evaluate":
        files += function_files(workspace, verifiable_functions(params.evaluate.verifiable))
    return files


def read_carried_files(workspace: Path, paths: Iterable[str]) -> dict[str, str]:
    """Return the contents of text files, and of all files in folders, by path; missing ones are left out.

    Raises:
        TransferFailed: a file is not text, or together they are too large to travel with a submission.
    """
    texts: dict[str, str] = {}
    for path in dict.fromkeys(paths):
        root = workspace / path
        for file in sorted(root.rglob("*")) if root.is_dir() else [root]:
            if not file.is_file():
                continue
            try:
                texts[file.relative_to(workspace).as_posix()] = file.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise TransferFailed(
                    f"{path} is an input that DVC does not cache, and it is not text: track it with `dvc add`",
                    final=True,
                ) from error
    total = sum(len(text.encode()) for text in texts.values())
    if total > CARRIED_BYTES:
        largest = max(texts, key=lambda path: len(texts[path]))
        raise TransferFailed(
            f"the inputs that DVC does not cache have {total} bytes in all, more than {CARRIED_BYTES}; the largest is "
            f"{largest}: track it with `dvc add`, or make it a cached output",
            final=True,
        )
    return texts


def receive_result(job: Job, client: SyncPrefectClient, flow_run: UUID) -> StageOutcome | None:
    """Return the outcome that a remote job reported, its result fetched; None if it reported none or was stopped."""
    report_of_run = ArtifactFilter(
        flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run]), type=ArtifactFilterType(any_=[REPORT_ARTIFACT])
    )
    artifacts = client.read_artifacts(artifact_filter=report_of_run, sort=ArtifactSort.UPDATED_DESC, limit=1)
    if not artifacts:
        return None
    data: Any = artifacts[0].data
    outcome, files = StageOutcome(**data["outcome"]), data["files"]
    if outcome.ok:
        return _fetch_result(job, outcome, files[LOCK_FILE])
    if outcome.action == "stopped":
        return None
    for path, text in files.items():
        if path in job.spec.outputs:
            atomic_write_text(job.spec.workspace / path, text)
    return outcome


def _fetch_result(job: Job, reported: StageOutcome, lock: str) -> StageOutcome:
    """Fetch the result into the cache, from where DVC's own ``repro`` takes it; nothing is ever computed here.

    DVC fetches what a dvc.lock names. That of the job names its result, in a folder that uses the same cache.
    """
    assert job.handoff is not None
    remote = job.handoff.remote["name"]
    folder = private_path(job.spec.workspace, "remote", job.spec.name, LOCK_FILE).parent
    try:
        rebuild_workspace(folder, job.handoff, cache_of(job.spec.workspace))
        atomic_write_text(folder / LOCK_FILE, lock)
        secrets = job.spec.workspace / ".dvc" / "config.local"
        if secrets.is_file():
            shutil.copy2(secrets, folder / ".dvc" / "config.local")
        fetch = ("fetch", "--run-cache", "--remote", remote, job.spec.name)
        dvc_transfer(folder, fetch, job.handoff.deliver_seconds, get_run_logger().warning)
    except (TransferFailed, StopRequested) as error:
        context = f"the result is in the DVC remote {remote}, but could not be fetched"
        return transfer_outcome(job.spec.name, error, context, reported.started)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    outcome = restore_result(job.spec)
    if outcome is None:
        message = f"the DVC remote {remote} has no result for the inputs as they are in this workspace now"
        return StageOutcome.failed(job.spec.name, message, started=reported.started, work_seconds=reported.work_seconds)
    if not outcome.ok:
        return outcome
    started = min(reported.started, outcome.started)  # the other host's clock may be ahead
    return replace(outcome, action=reported.action, started=started, work_seconds=reported.work_seconds)


def rebuild_workspace(workspace: Path, handoff: Handoff, cache: Path) -> None:
    """Write the files of the hand-off and DVC's settings to ``workspace``, which may exist from an earlier attempt.

    Raises:
        ValueError: the hand-off names a path outside the workspace.
    """
    from configobj import ConfigObj

    for path, text in handoff.files.items():
        if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
            raise ValueError(f"the submission names {path}, which is outside the workspace")
        atomic_write_text(workspace / path, text)
    settings = ConfigObj()
    name = handoff.remote["name"]
    settings["core"] = {"no_scm": "True", "analytics": "false", "check_update": "false", "remote": name}
    settings["cache"] = {"dir": str(cache)}
    settings[f'remote "{name}"'] = {key: value for key, value in handoff.remote.items() if key != "name"}
    atomic_write_text(workspace / ".dvc" / "config", "\n".join(settings.write()) + "\n")
