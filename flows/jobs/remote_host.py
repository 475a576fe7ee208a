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
from flows.jobs.job import Handoff
from flows.jobs.remote_client import REPORT_ARTIFACT, rebuild_workspace
from flows.jobs.transfer import LogShipper, TransferFailed, dvc_transfer, transfer_outcome
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


def run_remote_job(handoff: Handoff, spec: StageSpec) -> StageOutcome:
    """Run the stage in a workspace of this host and report its outcome to the server; a failing stage does not raise.

    ``spec`` is that of the pipeline, whose workspace does not exist here. A second job for the same computation on this
    host waits for the first one and then finds its result.
    """
    started = time.time()
    host = Path(os.environ.get(HOST_FOLDER_VARIABLE) or Path.home() / ".rlhf").expanduser().resolve()
    workspace = host / "jobs" / handoff.key
    spec = replace(spec, workspace=workspace, environment=_tracking_environment(spec.environment), pull=True)
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
    """Fetch the inputs, run the stage and push its result; return the outcome of the first step that fails."""
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
    except (TransferFailed, StopRequested) as error:
        return transfer_outcome(spec.name, error, context, started)
    return outcome


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


def publish_report(outcome: StageOutcome, workspace: Path, files: dict[str, str]) -> None:
    """Send the outcome to the server, for up to ten minutes; without it the pipeline sees the flow run's state only.

    ``files`` are the contents of small text outputs by path, for a gate that did not pass.
    """
    report = {"outcome": asdict(outcome), "host": socket.gethostname(), "folder": str(workspace), "files": files}
    artifact = ArtifactCreate(type=REPORT_ARTIFACT, data=report, flow_run_id=UUID(str(runtime.flow_run.id)))
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
