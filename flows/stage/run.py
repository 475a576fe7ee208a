"""One stage, run by ``dvc repro --single-item`` under the guard. The same code runs beside the flow and on a pool."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flows.stage.outcome import StageOutcome, clear_outcome, failed_conditions, gate_evidence, stage_report
from flows.supervision.clock import Stopwatch
from flows.supervision.environment import child_environment
from flows.supervision.processes import SupervisedProcess, start_supervised
from flows.supervision.signals import STOP
from flows.workspace.folder import private_path
from flows.workspace.lock import locked
from rlhf_core.errors import EXIT_GATE_FAILED, EXIT_INTERRUPTED, EXIT_USER_ERROR

POLL_SECONDS = 0.1


class StageFailed(Exception):
    """Carries the outcome of a stage that did not succeed through the engine."""

    def __init__(self, outcome: StageOutcome) -> None:
        super().__init__(outcome.message)
        self.outcome = outcome


def stage_log(workspace: Path, stage: str) -> Path:
    """Where the output of a stage goes."""
    return private_path(workspace, "logs", f"{stage}.log")


def dvc_command(stage: str) -> list[str]:
    """The flag before ``repro`` matters: without it a stage that ends while another caches an output is lost."""
    return [sys.executable, "-m", "dvc", "--wait-for-lock", "repro", "--single-item", stage]


def run_stage(
    workspace: Path,
    stage: str,
    outputs: tuple[str, ...] = (),
    extra_env: Mapping[str, str] | None = None,
    grace: float = 5.0,
    command: list[str] | None = None,
) -> StageOutcome:
    """Bring one stage up to date; never raises for a failing stage. A raised stop flag ends it.

    ``command`` replaces DVC's: the report of a failed run is written without DVC, since not all dependencies exist.
    A stage that still runs is waited for: an attempt that was given up for lost may live, or be on its way out.
    """
    try:
        with locked(workspace, f"stages/{stage}.lock", wait=True) as lock:
            return _run_alone(workspace, stage, outputs, extra_env or {}, grace, command, lock)
    except KeyboardInterrupt:
        return StageOutcome(stage, "stopped", EXIT_INTERRUPTED, "stopped", 0.0, 0.0, 0.0)


def _run_alone(
    workspace: Path,
    stage: str,
    outputs: tuple[str, ...],
    extra_env: Mapping[str, str],
    grace: float,
    command: list[str] | None,
    lock: int,
) -> StageOutcome:
    """:func:`run_stage` with the stage's lock held, which lasts until everything that is started here has ended."""
    clear_outcome(workspace, stage)
    log = stage_log(workspace, stage)
    offset = log.stat().st_size if log.exists() else 0
    watch = Stopwatch()
    _, old_gate = gate_evidence(workspace, outputs)
    supervised = start_supervised(
        command or dvc_command(stage),
        name=stage,
        cwd=workspace,
        env=child_environment(workspace, **extra_env),
        log=log,
        grace=grace,
        keep=[lock],
    )
    code = wait_for(supervised)
    text = log.read_bytes()[offset:].decode("utf-8", errors="replace")
    gate, mark = gate_evidence(workspace, outputs)
    outcome = _judge(workspace, stage, gate if mark != old_gate else None, code, text, watch)
    if command and outcome.ok:
        outcome = replace(outcome, action="ran", work=outcome.ended - outcome.started)
    outcome.save(workspace)
    return outcome


def wait_for(supervised: SupervisedProcess) -> int:
    """Exit status of the guarded command, which a raised stop flag ends; it never outlives this call."""
    try:
        while (code := supervised.poll()) is None and not STOP.wait(POLL_SECONDS):
            pass
        return code if code is not None else supervised.stop()
    except BaseException:
        supervised.stop()
        raise


def _judge(
    workspace: Path, stage: str, gate: Mapping[str, Any] | None, code: int, text: str, watch: Stopwatch
) -> StageOutcome:
    """``gate`` is the evidence that was written meanwhile, if any was."""
    started, ended = watch.started, watch.now
    spoken = stage_report(workspace, stage)
    work = float((spoken or {}).get("seconds", ended - started))

    def outcome(action: str, exit_code: int, message: str) -> StageOutcome:
        return StageOutcome(stage, action, exit_code, message, started, ended, 0.0 if action == "cached" else work)

    if code == 0:
        ran = f"Running stage '{stage}'" in text or spoken is not None
        return outcome("ran" if ran else "cached", 0, "")
    if STOP.is_set():
        return outcome("stopped", EXIT_INTERRUPTED, "stopped")
    if not spoken and gate and gate.get("passed") is False:
        spoken = {"exit_code": EXIT_GATE_FAILED, "message": failed_conditions(gate)}
    if spoken and spoken.get("exit_code"):
        return outcome("failed", int(spoken["exit_code"]), str(spoken.get("message", "")))
    return outcome("failed", *_explain(code, text))


def _explain(code: int, text: str) -> tuple[int, str]:
    """Exit code and message for an end without a verdict: a kill, or an error of DVC's own."""
    if code - 128 in set(signal.Signals):
        return code, f"dvc was killed ({signal.Signals(code - 128).name})"
    errors = [line.removeprefix("ERROR: ") for line in text.splitlines() if line.startswith("ERROR: ")]
    message = errors[-1] if errors else f"ended with status {code}"
    crashed = any("failed to run" in line or "is busy" in line for line in errors) or not errors
    return (1 if crashed else EXIT_USER_ERROR), message
