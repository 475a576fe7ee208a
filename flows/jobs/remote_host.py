"""A stage on a host that does not see the workspace: rebuild the workspace, run the stage, push its result.

``RLHF_HOST_FOLDER`` (default ``~/.rlhf``) holds the rebuilt workspaces and the DVC cache that they share, which may be
deleted at any time: everything in it is in the DVC remote too, but for results that a job reports as kept. A workspace
is kept until its result has been pushed, so that the next attempt on this host finds partial state and result.
"""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from uuid import UUID

import httpx
from prefect import get_run_logger, runtime
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactCreate

from flows.dvc_repo.lock_file import LOCK_FILE
from flows.jobs.job import Handoff, RemoteJobReport
from flows.jobs.remote_client import REPORT_ARTIFACT, rebuild_workspace
from flows.jobs.transfer import LogShipper, TransferFailed, transfer_outcome, transfer_with_retries
from flows.stage.outcome import StageOutcome
from flows.stage.run import StageSpec, run_stage, stage_log
from flows.supervision.processes import run_module
from flows.supervision.signals import StopRequested, retry
from flows.workspace.cleanup import cleanup
from flows.workspace.lock import locked
from rlhf_core.errors import EXIT_GATE_FAILED, EXIT_USER_ERROR, RlhfError
from rlhf_core.git import git_revision

HOST_FOLDER_VARIABLE = "RLHF_HOST_FOLDER"
FINGERPRINTS = ".fingerprints"
SMALL_BYTES = 64_000
REPORT_SECONDS = 600.0


def host_folder() -> Path:
    """Return the folder in which this host keeps the workspaces of remote jobs and their cache."""
    return Path(os.environ.get(HOST_FOLDER_VARIABLE) or Path.home() / ".rlhf").expanduser().resolve()


def run_remote_job(handoff: Handoff, spec: StageSpec) -> StageOutcome:
    """Run the stage in a workspace of this host and report its outcome to the server; a failing stage does not raise.

    ``spec`` is that of the pipeline, whose workspace does not exist here. A second job for the same computation on this
    host waits for the first one and then finds its result.
    """
    started = time.time()
    host = host_folder()
    try:
        with locked(host, f"{handoff.key}.lock", wait=True, on_wait=get_run_logger().info):
            job = RemoteJob(handoff, spec, host / "jobs" / handoff.key)
            outcome = job.run(host / "cache")
            publish_report(outcome, job.workspace, _report_files(job.spec, outcome))
            if outcome.ok:
                shutil.rmtree(job.workspace, ignore_errors=True)
    except KeyboardInterrupt:
        return StageOutcome.stopped(spec.name, started=started)
    except RlhfError as error:
        message = f"{socket.gethostname()}: {error}"
        outcome = StageOutcome.failed(spec.name, message, error.exit_code, started=started)
        publish_report(outcome, host, {})
    return outcome


class RemoteJob:
    """One attempt at a stage in ``workspace``, a folder of this host."""

    def __init__(self, handoff: Handoff, spec: StageSpec, workspace: Path) -> None:
        self.handoff, self.workspace = handoff, workspace
        self.spec = replace(spec, workspace=workspace, environment=_tracking_environment(spec.environment), pull=True)
        self.started = time.time()

    def run(self, cache: Path) -> StageOutcome:
        """Fetch the inputs, run the stage and push its result; return the outcome of the first step that fails."""
        stage, remote = self.spec.name, self.handoff.remote["name"]
        rebuild_workspace(self.workspace, self.handoff, cache)
        cleanup(self.workspace)
        with LogShipper(stage_log(self.workspace, stage), UUID(str(runtime.flow_run.id))):
            self._log(f"on {socket.gethostname()} in {self.workspace}")
            difference = code_difference(self.workspace, self.handoff)
            if difference:
                return StageOutcome.failed(stage, difference, EXIT_USER_ERROR, started=self.started)
            try:
                if self.handoff.inputs:
                    self._transfer("pull", "--force", "--remote", remote, *self.handoff.inputs)
            except (TransferFailed, StopRequested) as error:
                context = f"inputs could not be fetched from the DVC remote {remote}"
                return transfer_outcome(stage, error, context, self.started)
            outcome = run_stage(self.spec)
            if not outcome.ok:
                return outcome
            try:
                self._transfer("push", "--run-cache", "--remote", remote, stage)
            except (TransferFailed, StopRequested) as error:
                context = (
                    f"the stage is done, but its result could not be pushed to the DVC remote {remote}; it is kept on "
                    f"{socket.gethostname()} in {self.workspace}, and the next attempt on that host only pushes it"
                )
                return transfer_outcome(stage, error, context, self.started)
            return outcome

    def _transfer(self, *arguments: str) -> None:
        transfer_with_retries(self.workspace, arguments, self.handoff.deliver_seconds, self._log)

    def _log(self, line: str) -> None:
        """Append a line to the stage's log, which the pipeline follows."""
        with stage_log(self.workspace, self.spec.name).open("a", encoding="utf-8") as stream:
            stream.write(f"{self.spec.name} {line}\n")


def code_difference(workspace: Path, handoff: Handoff) -> str:
    """Explain in one line why this host would compute something else: its code differs. Empty if it does not."""
    expected = {path: text for path, text in handoff.files.items() if path.startswith(f"{FINGERPRINTS}/")}
    if not expected:
        return ""
    result = run_module(workspace, "flows.cli", "fingerprint", "--workspace", str(workspace))
    if result.exit_code:
        return f"the code on {socket.gethostname()} cannot be fingerprinted: {result.error_line}"
    differing = [path for path, text in expected.items() if (workspace / path).read_text(encoding="utf-8") != text]
    if not differing:
        return ""
    return (
        f"code or source files on {socket.gethostname()} differ from the pipeline's ({', '.join(differing)}; revision "
        f"{git_revision(Path(__file__).parent)[:12]}, expected {handoff.revision[:12]}): install the same version there"
    )


def publish_report(outcome: StageOutcome, workspace: Path, files: Mapping[str, str]) -> None:
    """Send the outcome to the server, for up to ten minutes; without it the pipeline sees the flow run's state only."""
    report = RemoteJobReport(outcome, socket.gethostname(), str(workspace), dict(files))
    flow_run = UUID(str(runtime.flow_run.id))
    artifact = ArtifactCreate(type=REPORT_ARTIFACT, data=asdict(report), flow_run_id=flow_run)
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
    except (httpx.HTTPError, StopRequested):
        logger.error("the outcome did not reach the server")


def _report_files(spec: StageSpec, outcome: StageOutcome) -> dict[str, str]:
    """Return dvc.lock of a finished stage, or the small text outputs of a failed gate, whose evidence DVC forgets."""
    texts = {}
    if outcome.ok:
        texts[LOCK_FILE] = (spec.workspace / LOCK_FILE).read_text(encoding="utf-8")
    for path in spec.outputs if outcome.exit_code == EXIT_GATE_FAILED else ():
        file = spec.workspace / path
        if file.is_file() and file.stat().st_size <= SMALL_BYTES and file.stat().st_mtime >= outcome.started - 1:
            try:
                texts[path] = file.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
    return texts


def _tracking_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Drop the pipeline's MLflow run and switch tracking off, unless this host records to an MLflow server."""
    if os.environ.get("MLFLOW_TRACKING_URI", "").startswith(("http://", "https://")):
        return dict(environment)
    kept = {name: value for name, value in environment.items() if name != "RLHF_PARENT_RUN_ID"}
    return {**kept, "RLHF_TRACKING": "off"}
