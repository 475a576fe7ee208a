"""A stage on a host that does not see the workspace: what the pipeline sends and takes back, and
what the host does.

Inputs and result travel through the DVC remote (``flows.jobs.transfer``). The recipe, dvc.lock and
the small inputs that DVC does not cache travel with the submission; outcome and log come back
through the Prefect server. The host rebuilds the workspace, runs the stage and pushes its result.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path, PurePosixPath
from typing import Any
from uuid import UUID

import httpx
from prefect import get_run_logger, runtime
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    ArtifactFilterType,
)
from prefect.client.schemas.sorting import ArtifactSort

from flows.dvc_repo.graph import LOCK_FILE, StageNode, all_before, dvc_status, read_graph
from flows.dvc_repo.root import cache_of
from flows.jobs.job import Handoff, Job
from flows.jobs.transfer import (
    LogShipper,
    TransferFailed,
    describe_remote,
    dvc_transfer,
    restore_result,
)
from flows.stage import StageOutcome, StageSpec, run_stage, stage_log
from flows.supervision.processes import run_module
from flows.supervision.signals import retry
from flows.workspace import cleanup, locked, private_path
from rlhf_core.config.loading import PARAMS_FILE, load_params
from rlhf_core.config.params import Params
from rlhf_core.errors import EXIT_GATE_FAILED, EXIT_USER_ERROR, ConfigError, RlhfError
from rlhf_core.fingerprint.tracked_files import function_files, verifiable_functions
from rlhf_core.git import package_revision
from rlhf_core.storage.files import atomic_write_text

RECIPE_FILES = (PARAMS_FILE, "dvc.yaml", "dvc.lock", ".dvcignore")
CARRIED_BYTES = 400_000
DELIVER_SECONDS = 300
REPORT_ARTIFACT = "rlhf-outcome"
STAGES_WITH_REWARD_SOURCES = ("critic", "ppo", "evaluate")


def check_remote_stages(workspace: Path, params: Params) -> None:
    """Check what every stage needs that is placed on a pool whose workers do not see the workspace:
    a remote and files.

    Raises:
        ConfigError: a remote is missing or of a kind that cannot serve two hosts, or a stage cannot
            travel.
    """
    graph, stale = read_graph(workspace), dvc_status(workspace).keys()
    for stage, placement in params.pools.items():
        if placement.shared:
            continue
        try:
            describe_remote(workspace, placement.remote)
            if stage in graph and stale & {
                stage,
                *all_before(graph, stage),
            }:  # what is up to date stays here
                files_to_carry(workspace, graph[stage])
        except RlhfError as error:
            raise ConfigError(
                f"pools.{stage} has shared: false, but {error} (docs/operations.md)"
            ) from error


def prepare_remote_job(job: Job, node: StageNode) -> Job:
    """Push the inputs of ``job`` and return it with all its host needs.

    Raises:
        RlhfError: the stage cannot travel, or the remote is out of reach.
        KeyboardInterrupt: the stop flag was raised.
    """
    workspace, stage = job.spec.workspace, job.spec.name
    files = files_to_carry(workspace, node)
    remote = describe_remote(workspace, job.placement.remote)
    if node.cached_inputs:
        dvc_transfer(workspace, ("push", "--remote", remote["name"], *node.cached_inputs))
    handoff = Handoff(
        key=f"{stage}-{hashlib.sha256(f'{socket.gethostname()} {workspace}'.encode()).hexdigest()[:16]}",
        remote=remote,
        inputs=node.cached_inputs,
        files=files,
        revision=package_revision(),
        deliver_seconds=job.placement.deliver_seconds or DELIVER_SECONDS,
    )
    return replace(job, handoff=handoff)


def files_to_carry(workspace: Path, node: StageNode) -> dict[str, str]:
    """Return the contents of the files that travel with the submission of a stage, as far as they
    are there, by path.

    Raises:
        RlhfError: the stage cannot travel.
    """
    if not node.shareable:
        raise RlhfError(
            "DVC's run cache does not take this stage (frozen, always changed, or with outputs that are persisted or "
            "not cached), so its result cannot come back: place it on a pool that sees the workspace"
        )
    carried = [*node.carried_inputs, *_untracked_inputs(workspace, node.name)]
    outside = next(
        (path for path in (*node.cached_inputs, *carried) if path.startswith("..")), None
    )
    if outside is not None:
        raise RlhfError(
            f"{node.name} reads {outside}, which is outside the workspace: `dvc add` a copy in it"
        )
    return read_carried_files(workspace, [*RECIPE_FILES, *carried])


def _untracked_inputs(workspace: Path, stage: str) -> list[str]:
    """List files that the stage reads and dvc.yaml does not name: DeepSpeed settings and
    functions.
    """
    params = load_params(workspace)
    launch = {str(name): config for name, config in params.compute.launch.items()}.get(stage)
    files = (
        [launch.deepspeed]
        if launch and launch.deepspeed and not Path(launch.deepspeed).is_absolute()
        else []
    )
    if stage in STAGES_WITH_REWARD_SOURCES:
        files += function_files(workspace, params.ppo.reward.sources)
    if stage == "evaluate":
        files += function_files(workspace, verifiable_functions(params.evaluate.verifiable))
    return files


def read_carried_files(workspace: Path, paths: Iterable[str]) -> dict[str, str]:
    """Return the contents of text files, and of all files in folders, by path; missing ones are
    left out.

    Raises:
        RlhfError: a file is not text, or together they are too large to travel with a submission.
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
                raise RlhfError(
                    f"{path} is an input that DVC does not cache, and it is not text: track it with `dvc add`"
                ) from error
    total = sum(len(text.encode()) for text in texts.values())
    if total > CARRIED_BYTES:
        largest = max(texts, key=lambda path: len(texts[path]))
        raise RlhfError(
            f"the inputs that DVC does not cache have {total} bytes in all, more than {CARRIED_BYTES}; the largest is "
            f"{largest}: track it with `dvc add`, or make it a cached output"
        )
    return texts


def receive_result(job: Job, client: SyncPrefectClient, flow_run: UUID) -> StageOutcome | None:
    """Return the outcome that a remote job reported, its result fetched; None if it reported none
    or was stopped.
    """
    report_of_run = ArtifactFilter(
        flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run]),
        type=ArtifactFilterType(any_=[REPORT_ARTIFACT]),
    )
    artifacts = client.read_artifacts(
        artifact_filter=report_of_run, sort=ArtifactSort.UPDATED_DESC, limit=1
    )
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
    """Fetch the result into the cache, from where DVC's own ``repro`` takes it; nothing is ever
    computed here.

    DVC fetches what a dvc.lock names. That of the job names its result, in a folder that uses the
    same cache.
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
    except KeyboardInterrupt:
        return StageOutcome.stopped(job.spec.name, started=reported.started)
    except TransferFailed as error:
        message = f"the result is in the DVC remote {remote}, but could not be fetched: {error}"
        return StageOutcome.failed(
            job.spec.name, message, error.exit_code, started=reported.started
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    outcome = restore_result(job.spec)
    if outcome is None:
        message = f"the DVC remote {remote} has no result for the inputs as they are in this workspace now"
        return StageOutcome.failed(
            job.spec.name, message, started=reported.started, work_seconds=reported.work_seconds
        )
    if not outcome.ok:
        return outcome
    started = min(reported.started, outcome.started)  # the other host's clock may be ahead
    return replace(
        outcome, action=reported.action, started=started, work_seconds=reported.work_seconds
    )


def rebuild_workspace(workspace: Path, handoff: Handoff, cache: Path) -> None:
    """Write the files of the hand-off and DVC's settings to ``workspace``, which may exist from an
    earlier attempt.

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
    settings["core"] = {
        "no_scm": "True",
        "analytics": "false",
        "check_update": "false",
        "remote": name,
    }
    settings["cache"] = {"dir": str(cache)}
    settings[f'remote "{name}"'] = {
        key: value for key, value in handoff.remote.items() if key != "name"
    }
    atomic_write_text(workspace / ".dvc" / "config", "\n".join(settings.write()) + "\n")


HOST_FOLDER_VARIABLE = "RLHF_HOST_FOLDER"
FINGERPRINTS = ".fingerprints"
SMALL_BYTES = 64_000
REPORT_SECONDS = 600.0


def run_remote_job(handoff: Handoff, spec: StageSpec) -> StageOutcome:
    """Run the stage in a workspace of this host and report its outcome to the server; a failing
    stage does not raise.

    ``spec`` is that of the pipeline, whose workspace does not exist here. A second job for the same
    computation on this host waits for the first one and then finds its result.

    ``RLHF_HOST_FOLDER`` (default ``~/.rlhf``) holds the rebuilt workspaces and the DVC cache that
    they share, which may be deleted at any time: everything in it is in the DVC remote too, but for
    results that a job reports as kept. A workspace is kept until its result has been pushed, so
    that the next attempt finds partial state and result.
    """
    started = time.time()
    host = (
        Path(os.environ.get(HOST_FOLDER_VARIABLE) or Path.home() / ".rlhf").expanduser().resolve()
    )
    workspace = host / "jobs" / handoff.key
    spec = replace(
        spec, workspace=workspace, environment=_tracking_environment(spec.environment), pull=True
    )
    try:
        with locked(host, f"{handoff.key}.lock", wait=True, on_wait=get_run_logger().info):
            rebuild_workspace(workspace, handoff, host / "cache")
            cleanup(workspace)
            with LogShipper(stage_log(workspace, spec.name), UUID(str(runtime.flow_run.id))):
                outcome = _fetch_run_push(handoff, spec, started)
            publish_report(outcome, workspace, _report_files(spec, outcome))
            if outcome.ok:
                shutil.rmtree(workspace, ignore_errors=True)
    except KeyboardInterrupt:
        return StageOutcome.stopped(spec.name, started=started)
    except RlhfError as error:
        message = f"{socket.gethostname()}: {error}"
        outcome = StageOutcome.failed(spec.name, message, error.exit_code, started=started)
        publish_report(outcome, host, {})
    return outcome


def _fetch_run_push(handoff: Handoff, spec: StageSpec, started: float) -> StageOutcome:
    """Fetch the inputs, run the stage and push its result; return the outcome of the first step
    that fails.
    """
    host, remote = socket.gethostname(), handoff.remote["name"]

    def log(line: str) -> None:  # which the pipeline follows
        with stage_log(spec.workspace, spec.name).open("a", encoding="utf-8") as stream:
            stream.write(f"{spec.name} {line}\n")

    log(f"on {host} in {spec.workspace}")
    if difference := code_difference(spec.workspace, handoff):
        return StageOutcome.failed(spec.name, difference, EXIT_USER_ERROR, started=started)
    context = f"inputs could not be fetched from the DVC remote {remote}"
    try:
        if handoff.inputs:
            pull = ("pull", "--force", "--remote", remote, *handoff.inputs)
            dvc_transfer(spec.workspace, pull, handoff.deliver_seconds, log)
        outcome = run_stage(spec)
        if outcome.ok:
            context = (
                f"the stage is done, but its result could not be pushed to the DVC remote {remote}; it is kept on "
                f"{host} in {spec.workspace}, and the next attempt on that host only pushes it"
            )
            push = ("push", "--run-cache", "--remote", remote, spec.name)
            dvc_transfer(spec.workspace, push, handoff.deliver_seconds, log)
    except TransferFailed as error:
        return StageOutcome.failed(
            spec.name, f"{context}: {error}", error.exit_code, started=started
        )
    return outcome


def code_difference(workspace: Path, handoff: Handoff) -> str:
    """Explain in one line why this host would compute something else: its code differs. Empty if it
    does not.
    """
    expected = {
        path: text for path, text in handoff.files.items() if path.startswith(f"{FINGERPRINTS}/")
    }
    if not expected:
        return ""
    result = run_module(workspace, "flows.cli", "fingerprint", "--workspace", str(workspace))
    if result.exit_code:
        return f"the code on {socket.gethostname()} cannot be fingerprinted: {result.error_line}"
    differing = [
        path
        for path, text in expected.items()
        if (workspace / path).read_text(encoding="utf-8") != text
    ]
    if not differing:
        return ""
    return (
        f"code or source files on {socket.gethostname()} differ from the pipeline's ({', '.join(differing)}; revision "
        f"{package_revision()[:12]}, expected {handoff.revision[:12]}): install the same version there"
    )


def publish_report(outcome: StageOutcome, workspace: Path, files: dict[str, str]) -> None:
    """Send the outcome to the server, for up to ten minutes; without it the pipeline sees the flow
    run's state only.

    ``files`` are the contents of small text outputs by path, for a gate that did not pass.
    """
    report = {
        "outcome": asdict(outcome),
        "host": socket.gethostname(),
        "folder": str(workspace),
        "files": files,
    }
    artifact = ArtifactCreate(
        type=REPORT_ARTIFACT, data=report, flow_run_id=UUID(str(runtime.flow_run.id))
    )
    logger = get_run_logger()

    def send() -> None:
        with get_client(sync_client=True) as client:
            client.create_artifact(artifact)

    try:
        retry(
            send,
            REPORT_SECONDS,
            is_transient=lambda error: isinstance(error, httpx.HTTPError),
            report=lambda line: logger.warning("the outcome did not reach the server: %s", line),
        )
    except (httpx.HTTPError, KeyboardInterrupt):
        logger.error("the outcome did not reach the server")


def _report_files(spec: StageSpec, outcome: StageOutcome) -> dict[str, str]:
    """Return dvc.lock of a finished stage, or the small text outputs of a failed gate, whose
    evidence DVC forgets.
    """
    texts = {}
    if outcome.ok:
        texts[LOCK_FILE] = (spec.workspace / LOCK_FILE).read_text(encoding="utf-8")
    for path in spec.outputs if outcome.exit_code == EXIT_GATE_FAILED else ():
        file = spec.workspace / path
        if (
            file.is_file()
            and file.stat().st_size <= SMALL_BYTES
            and file.stat().st_mtime >= outcome.started - 1
        ):
            try:
                texts[path] = file.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
    return texts


def _tracking_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Drop the pipeline's MLflow run and switch tracking off, unless this host records to an MLflow
    server.
    """
    if os.environ.get("MLFLOW_TRACKING_URI", "").startswith(("http://", "https://")):
        return dict(environment)
    kept = {name: value for name, value in environment.items() if name != "RLHF_PARENT_RUN_ID"}
    return {**kept, "RLHF_TRACKING": "off"}
