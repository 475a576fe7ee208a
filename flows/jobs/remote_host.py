"""A handed-over stage on its host: a workspace made from the submission, the stage run in it, its result delivered.

``RLHF_HOST_FOLDER`` (``~/.rlhf`` unless set) is where this host keeps such workspaces and the DVC cache they share. A
workspace stays until its result has been delivered, so the next attempt on this host finds partial state and result.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from uuid import UUID

import httpx
from prefect import get_run_logger, runtime
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactCreate

from flows.jobs.host_cache import in_use
from flows.jobs.job import Handoff
from flows.jobs.log_shipping import LogShipper
from flows.jobs.remote_client import REPORT, failed
from flows.jobs.transfer import TransferFailed, TransferStopped, patiently, transfer
from flows.stage.outcome import StageOutcome
from flows.stage.run import run_stage, stage_log
from flows.supervision.environment import child_environment
from flows.supervision.signals import STOP
from flows.workspace.cleanup import cleanup
from flows.workspace.git import git_revision
from flows.workspace.lock import locked
from rlhf_core.errors import EXIT_GATE_FAILED, EXIT_INTERRUPTED, EXIT_USER_ERROR, RlhfError
from rlhf_core.files import atomic_write_text

HOST_FOLDER_VARIABLE = "RLHF_HOST_FOLDER"
CODE = ".fingerprints"
SMALL_BYTES = 64_000
REPORT_SECONDS = 600.0


def host_folder() -> Path:
    """Where this host keeps the workspaces of jobs and their cache."""
    return Path(os.environ.get(HOST_FOLDER_VARIABLE) or Path.home() / ".rlhf").expanduser().resolve()


def run_remote_job(
    handoff: Handoff, stage: str, outputs: tuple[str, ...], environment: Mapping[str, str], grace: float
) -> StageOutcome:
    """Run the stage in a workspace of this host and report its outcome to the server; never raises for a failing stage.

    A second job for the same computation on this host waits for the first, and then finds its result.
    """
    started = time.time()
    host = host_folder()
    try:
        with in_use(host), locked(host, f"{handoff.key}.lock", wait=True, on_wait=get_run_logger().info):
            job = RemoteJob(handoff, stage, outputs, environment, grace, host / "jobs" / handoff.key)
            outcome = job.run(host / "cache")
            publish(outcome, job.workspace, _small_outputs(job.workspace, outputs, outcome))
            if outcome.ok:
                shutil.rmtree(job.workspace, ignore_errors=True)
    except KeyboardInterrupt:
        return StageOutcome(stage, "stopped", EXIT_INTERRUPTED, "stopped", started, time.time(), 0.0)
    except RlhfError as error:
        outcome = StageOutcome(
            stage, "failed", error.exit_code, f"{socket.gethostname()}: {error}", started, time.time(), 0.0
        )
        publish(outcome, host, {})
    return outcome


class RemoteJob:
    """One attempt at a handed-over stage, in ``workspace``."""

    def __init__(
        self,
        handoff: Handoff,
        stage: str,
        outputs: tuple[str, ...],
        environment: Mapping[str, str],
        grace: float,
        workspace: Path,
    ) -> None:
        self.handoff, self.stage, self.outputs, self.grace = handoff, stage, outputs, grace
        self.workspace = workspace
        self.environment = _tracked(environment)
        self.started = time.time()

    def run(self, cache: Path) -> StageOutcome:
        """Outcome of the stage, or of what kept it from being run or delivered."""
        rebuild(self.workspace, self.handoff, cache)
        cleanup(self.workspace)
        with LogShipper(stage_log(self.workspace, self.stage), UUID(str(runtime.flow_run.id))):
            self._tell(f"on {socket.gethostname()} in {self.workspace}")
            problem = other_code(self.workspace, self.handoff)
            if problem:
                return StageOutcome(self.stage, "failed", EXIT_USER_ERROR, problem, self.started, time.time(), 0.0)
            return self._take() or self._deliver(
                run_stage(self.workspace, self.stage, self.outputs, self.environment, self.grace)
            )

    def _take(self) -> StageOutcome | None:
        """The inputs into the workspace; an outcome only if that fails."""
        try:
            self._exchange("take")
        except (TransferFailed, TransferStopped) as problem:
            where = f"inputs could not be fetched from the DVC remote {self.handoff.remote['name']}"
            return failed(self.stage, problem, where, self.started)
        return None

    def _deliver(self, outcome: StageOutcome) -> StageOutcome:
        """Push what the stage made; a remote that stays out of reach makes it a failure that loses nothing."""
        if not outcome.ok:
            return outcome
        try:
            self._exchange("give")
        except (TransferFailed, TransferStopped) as problem:
            where = (
                f"done, but the DVC remote {self.handoff.remote['name']} does not take the result, which lies on "
                f"{socket.gethostname()} in {self.workspace}; the next attempt there only delivers it"
            )
            return failed(self.stage, problem, where, self.started)
        return outcome

    def _exchange(self, command: str) -> None:
        remote = self.handoff.remote["name"]
        patiently(
            lambda: transfer(self.workspace, command, self.stage, remote), self.handoff.deliver_seconds, self._tell
        )

    def _tell(self, line: str) -> None:
        """A line in the stage's log, which the caller sees."""
        with stage_log(self.workspace, self.stage).open("a", encoding="utf-8") as stream:
            stream.write(f"{self.stage} {line}\n")


def rebuild(workspace: Path, handoff: Handoff, cache: Path) -> None:
    """Make ``workspace`` from the submission, or bring the one of an earlier attempt up to date with it."""
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


def other_code(workspace: Path, handoff: Handoff) -> str:
    """Why this host would compute something else than was asked for: its code differs. Empty when it does not."""
    asked = {path: text for path, text in handoff.files.items() if path.startswith(f"{CODE}/")}
    if not asked:
        return ""
    command = [sys.executable, "-m", "flows.cli", "fingerprint", "--workspace", str(workspace)]
    made = subprocess.run(
        command, cwd=workspace, env=child_environment(workspace), capture_output=True, text=True, timeout=600
    )
    if made.returncode:
        last = (made.stderr.strip().splitlines() or ["no message"])[-1]
        return f"the code on {socket.gethostname()} cannot be identified: {last}"
    differ = [path for path, text in asked.items() if (workspace / path).read_text(encoding="utf-8") != text]
    if not differ:
        return ""
    return (
        f"the worker on {socket.gethostname()} has other code or source files than the pipeline ({', '.join(differ)}; "
        f"revision {git_revision(Path(__file__).parent)[:12]}, wanted {handoff.revision[:12]}): install the same "
        "version there"
    )


def publish(outcome: StageOutcome, workspace: Path, files: Mapping[str, str]) -> None:
    """Tell the server how the stage ended, for up to ten minutes; the caller then has the flow run's state alone."""
    data = {"outcome": asdict(outcome), "host": socket.gethostname(), "folder": str(workspace), "files": dict(files)}
    artifact = ArtifactCreate(type=REPORT, data=data, flow_run_id=UUID(str(runtime.flow_run.id)))
    deadline = time.monotonic() + REPORT_SECONDS
    while True:
        try:
            with get_client(sync_client=True) as client:
                client.create_artifact(artifact)
            return
        except httpx.HTTPError as error:
            get_run_logger().warning("the outcome has not reached the server (%s); trying again", error)
        if time.monotonic() > deadline or STOP.wait(2.0):
            return


def _small_outputs(workspace: Path, outputs: tuple[str, ...], outcome: StageOutcome) -> dict[str, str]:
    """The evidence of a gate that did not pass, which DVC does not keep then: the stage's small text files."""
    texts = {}
    for path in outputs if outcome.exit_code == EXIT_GATE_FAILED else ():
        file = workspace / path
        if file.is_file() and file.stat().st_size <= SMALL_BYTES and file.stat().st_mtime >= outcome.started - 1:
            try:
                texts[path] = file.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
    return texts


def _tracked(environment: Mapping[str, str]) -> dict[str, str]:
    """The caller's run in the record is one of this stage's only where both write to the same MLflow server."""
    if os.environ.get("MLFLOW_TRACKING_URI", "").startswith(("http://", "https://")):
        return dict(environment)
    kept = {name: value for name, value in environment.items() if name != "RLHF_PARENT_RUN_ID"}
    return {**kept, "RLHF_TRACKING": "off"}
