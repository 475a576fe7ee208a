"""The pipeline's side of a stage on a host that does not see the workspace.

Inputs and result travel through the DVC remote (``flows.jobs.transfer_worker``). The recipe, dvc.lock and the small
inputs that DVC does not cache travel with the submission; outcome and log come back through the Prefect server.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from uuid import UUID

from prefect import get_run_logger
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, ArtifactFilterType
from prefect.client.schemas.sorting import ArtifactSort

from flows.dvc_repo.graph import StageNode
from flows.jobs.job import Handoff, Job, RemoteJobReport
from flows.jobs.log_shipping import LogFollower
from flows.jobs.transfer import TransferFailed, transfer, transfer_with_retries
from flows.stage.outcome import StageOutcome
from flows.stage.run import run_stage, stage_log
from flows.stage.stage_hash import stage_hash
from flows.supervision.signals import StopRequested
from flows.workspace.recipe import EXPECTATIONS
from rlhf_core.config.loading.load import PARAMS_FILE, Params, load_params
from rlhf_core.errors import EXIT_USER_ERROR, ConfigError, DataError
from rlhf_core.fingerprint.tracked_files import function_files, verifiable_functions
from rlhf_core.git import git_revision
from rlhf_core.storage.file_patterns import expand, spelled
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
        KeyboardInterrupt: the stop flag was raised.
    """
    remotes = {placement.remote: stage for stage, placement in params.pools.items() if not placement.shared}
    for remote, stage in remotes.items():
        try:
            transfer(workspace, "describe-remote", remote=remote or "")
        except TransferFailed as error:
            raise ConfigError(f"pools.{stage} has shared: false, but {error} (docs/operations.md)") from error
        except StopRequested as stop:
            raise KeyboardInterrupt from stop


def prepare_remote_job(job: Job, node: StageNode) -> Job | None:
    """Push the inputs of ``job`` and return it with all its host needs; None when the result is in the cache already.

    Raises:
        TransferFailed: the stage cannot travel, or the remote is out of reach.
        StopRequested: the stop flag was raised.
    """
    if not node.shareable:
        raise TransferFailed(
            "DVC's run cache does not take this stage (frozen, always changed, or with persisted outputs), so its "
            "result cannot come back: place it on a pool that sees the workspace",
            final=True,
        )
    pushed = transfer(job.workspace, "push-inputs", job.stage, job.placement.remote or "")
    if pushed.result_cached:
        return None
    # The hash must be the same for every workspace that uses this remote.
    shared_hash = stage_hash(job.workspace, replace(node, cache=pushed.remote["url"]))
    if shared_hash is None:
        raise TransferFailed("an input is missing; run the stages before it", final=True)
    untracked = _untracked_inputs(job.workspace, job.stage)
    handoff = Handoff(
        key=f"{job.stage}-{shared_hash[:16]}",
        remote=pushed.remote,
        files=read_carried_files(job.workspace, [*RECIPE_FILES, *pushed.carried_inputs, *untracked]),
        revision=git_revision(Path(__file__).parent),
        deliver_seconds=job.placement.deliver_seconds or DELIVER_SECONDS,
    )
    return replace(job, stage_hash=shared_hash, handoff=handoff)


def _untracked_inputs(workspace: Path, stage: str) -> list[str]:
    """List files that the stage reads and DVC does not track: DeepSpeed settings, functions, questions, suites."""
    params = load_params(workspace)
    launch = {str(name): config for name, config in params.compute.launch.items()}.get(stage)
    files = [launch.deepspeed] if launch and launch.deepspeed and not Path(launch.deepspeed).is_absolute() else []
    if stage in STAGES_WITH_REWARD_SOURCES:
        files += function_files(workspace, params.ppo.reward.sources)
    if stage == "validate":
        files.append(EXPECTATIONS)
    if stage == "evaluate":
        patterns = [pattern for kind in params.evaluate.untracked_files.values() for pattern in kind]
        files += [file for pattern in patterns for file in _carried(workspace, pattern)]
        files += function_files(workspace, verifiable_functions(params.evaluate.verifiable))
    return files


def _carried(workspace: Path, pattern: str) -> list[str]:
    """List the files of a pattern that lie in the workspace; others must be at the same path on the other host."""
    try:
        files = expand(pattern, workspace)
    except DataError as error:
        raise TransferFailed(str(error), final=True) from error
    root = workspace.resolve()
    return [spelled(file, "", workspace) for file in files if file.resolve().is_relative_to(root)]


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


class RemoteJobClient:
    """The pipeline's connection to one remote job: its log while it runs, its outcome and result at the end."""

    def __init__(self, job: Job, client: SyncPrefectClient, flow_run: UUID) -> None:
        self.job, self.client, self.flow_run = job, client, flow_run
        self.follower = LogFollower(stage_log(job.workspace, job.stage))

    def follow_log(self, now: bool = False) -> None:
        """Append new lines of the stage's remote log to its log here."""
        self.follower.fetch(self.client, self.flow_run, now=now)

    def receive(self) -> StageOutcome | None:
        """Return the outcome that the job reported, its result fetched; None if it reported none or was stopped."""
        self.follow_log(now=True)
        report_of_run = ArtifactFilter(
            flow_run_id=ArtifactFilterFlowRunId(any_=[self.flow_run]), type=ArtifactFilterType(any_=[REPORT_ARTIFACT])
        )
        artifacts = self.client.read_artifacts(artifact_filter=report_of_run, sort=ArtifactSort.UPDATED_DESC, limit=1)
        if not artifacts:
            return None
        report = RemoteJobReport.from_data(artifacts[0].data)
        if report.outcome.ok:
            return self._fetch_result(report.outcome)
        if report.outcome.action == "stopped":
            return None
        for path, text in report.files.items():
            if path in self.job.spec.outputs:
                atomic_write_text(self.job.workspace / path, text)
        return report.outcome

    def _fetch_result(self, reported: StageOutcome) -> StageOutcome:
        """Fetch the result into the cache, from where DVC's own ``repro`` takes it; nothing is ever computed here."""
        job = self.job
        assert job.handoff is not None
        remote = job.handoff.remote["name"]
        warn = get_run_logger().warning
        try:
            fetched = transfer_with_retries(
                job.workspace, "fetch-result", job.stage, remote, job.handoff.deliver_seconds, warn
            )
        except (TransferFailed, StopRequested) as error:
            context = f"the result is in the DVC remote {remote}, but could not be fetched"
            return transfer_outcome(job.stage, error, context, reported.started)
        if not fetched.result_cached:
            message = f"the DVC remote {remote} has no result for the inputs as they are in this workspace now"
            return StageOutcome.failed(job.stage, message, started=reported.started, work_seconds=reported.work_seconds)
        outcome = run_stage(job.spec)
        if not outcome.ok:
            return outcome
        started = min(reported.started, outcome.started)  # the other host's clock may be ahead
        return replace(outcome, action=reported.action, started=started, work_seconds=reported.work_seconds)


def transfer_outcome(stage: str, error: TransferFailed | StopRequested, context: str, started: float) -> StageOutcome:
    """Return the outcome of a stage whose inputs or result could not be transferred."""
    if isinstance(error, StopRequested):
        return StageOutcome.stopped(stage, started=started)
    return StageOutcome.failed(stage, f"{context}: {error}", EXIT_USER_ERROR if error.final else 1, started=started)
