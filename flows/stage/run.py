"""Run one stage with ``dvc repro --single-item`` under a supervisor, beside the flow or on a work pool alike."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from flows.stage.outcome import (
    StageOutcome,
    clear_outcome,
    failed_conditions,
    last_progress,
    load_gate_file,
    load_report,
)
from flows.supervision.processes import LogReader, SupervisedResult, child_environment, dvc_errors, run_supervised
from flows.supervision.signals import STOP, Stopwatch
from flows.workspace.folder import private_path
from flows.workspace.lock import locked
from rlhf_core.errors import EXIT_GATE_FAILED, EXIT_USER_ERROR

PROGRESS_SECONDS, PROGRESS_BYTES = 10.0, 8192


@dataclass(frozen=True)
class StageSpec:
    """A stage to run, and how.

    Attributes:
        outputs: its outputs, relative to the workspace.
        environment: variables to set on top of the usual environment.
        grace: seconds that a stopped stage has to save its state.
        command: the command to run in place of DVC, which requires all dependencies to exist.
        pull: take the result from the run cache of the default DVC remote where that has it.
    """

    workspace: Path
    name: str
    outputs: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    grace: float = 5.0
    command: tuple[str, ...] | None = None
    pull: bool = False


def stage_log(workspace: Path, stage: str) -> Path:
    """Return the file to which the output of a stage goes."""
    return private_path(workspace, "logs", f"{stage}.log")


@contextmanager
def logged_progress(workspace: Path, stage: str, log: Callable[[str], None]) -> Iterator[None]:
    """Give the stage's newest progress line to ``log`` while the block runs, every ten seconds if it has changed."""
    reader = LogReader(stage_log(workspace, stage))
    ended = threading.Event()

    def follow() -> None:
        said = None
        while True:
            last = ended.wait(PROGRESS_SECONDS)
            progress = last_progress(reader.text(PROGRESS_BYTES))
            if progress is not None and progress != said:
                said = progress
                log(progress.line)
            if last:
                return

    thread = threading.Thread(target=follow, name=f"progress-{stage}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def run_stage(spec: StageSpec) -> StageOutcome:
    """Bring one stage up to date, and save and return its outcome; a failing stage does not raise.

    A raised stop flag stops the stage. If an earlier attempt at the stage still runs, it is waited for: a job that was
    taken for dead may be alive, or its supervisor may still be stopping it.
    """
    try:
        with locked(spec.workspace, f"stages/{spec.name}.lock", wait=True) as lock:
            return _run_locked(spec, lock)
    except KeyboardInterrupt:
        return StageOutcome.stopped(spec.name)


def _run_locked(spec: StageSpec, lock: int) -> StageOutcome:
    """Run the stage; its supervisor holds the descriptor ``lock`` until every process of the stage has ended."""
    clear_outcome(spec.workspace, spec.name)
    watch = Stopwatch()
    gate_before = load_gate_file(spec.workspace, spec.outputs)
    # The flag belongs before `repro`: without it a stage that ends while another caches its output fails.
    repro = (sys.executable, "-m", "dvc", "--wait-for-lock", "repro", "--single-item", spec.name)
    pull = ("--pull",) if spec.pull else ()
    result = run_supervised(
        spec.command or (*repro, *pull),
        name=spec.name,
        cwd=spec.workspace,
        env=child_environment(spec.workspace, **spec.environment),
        log=stage_log(spec.workspace, spec.name),
        grace=spec.grace,
        inherited_descriptors=[lock],
    )
    gate = load_gate_file(spec.workspace, spec.outputs)
    outcome = _outcome(spec, result, gate[0] if gate is not None and gate != gate_before else None, watch)
    outcome.save(spec.workspace)
    return outcome


def _outcome(
    spec: StageSpec, result: SupervisedResult, gate_decision: Mapping[str, object] | None, watch: Stopwatch
) -> StageOutcome:
    """Tell from the exit status, the stage's own report and a gate decision made meanwhile how the stage ended."""
    started, ended = watch.started, watch.now
    report = load_report(spec.workspace, spec.name)
    work_seconds = report.seconds if report is not None else ended - started
    if result.exit_code == 0:
        ran = spec.command or report is not None or f"Running stage '{spec.name}'" in result.output
        if ran:
            return StageOutcome.ran(spec.name, started, ended, work_seconds)
        return StageOutcome.cached(spec.name, started, ended)
    if STOP.is_set():
        return StageOutcome.stopped(spec.name, started=started, ended=ended, work_seconds=work_seconds)
    if report is not None and report.exit_code:
        exit_code, message = report.exit_code, report.message
    elif report is None and gate_decision and gate_decision.get("passed") is False:
        exit_code, message = EXIT_GATE_FAILED, failed_conditions(gate_decision)
    else:
        exit_code, message = _dvc_failure(result)
    return StageOutcome.failed(spec.name, message, exit_code, started=started, ended=ended, work_seconds=work_seconds)


def _dvc_failure(result: SupervisedResult) -> tuple[int, str]:
    """Return exit code and message for a stage that left no report: DVC was killed, or failed itself."""
    if result.exit_code - 128 in set(signal.Signals):
        return result.exit_code, f"dvc was killed ({signal.Signals(result.exit_code - 128).name})"
    errors = dvc_errors(result.output)
    if not errors:
        return 1, f"dvc exited with status {result.exit_code}"
    crashed = any("failed to run" in error or "is busy" in error for error in errors)
    return (1 if crashed else EXIT_USER_ERROR), errors[-1]
