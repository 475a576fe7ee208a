"""One stage, here or on a work pool: ``dvc repro --single-item`` under a supervisor."""

from __future__ import annotations

import json
import logging
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from flows.supervision.processes import (
    CommandResult,
    LogReader,
    child_environment,
    dvc_errors,
    start_supervised,
)
from flows.supervision.signals import STOP, Stopwatch
from flows.workspace import locked, private_path
from rlhf_core.errors import (
    EXIT_GATE_FAILED,
    EXIT_INTERRUPTED,
    EXIT_PREEMPTED,
    EXIT_TRAINING_PAUSED,
    EXIT_USER_ERROR,
)
from rlhf_core.gates import GateDecision
from rlhf_core.stages.runtime.kept_result import KeptResult
from rlhf_core.stages.runtime.launcher import OUTCOMES, StageExit, outcome_path
from rlhf_core.storage.files import atomic_write_json

# Exit codes that a retry would not change. A preempted stage is run again without using up a retry.
FINAL_CODES = {
    EXIT_USER_ERROR,
    EXIT_GATE_FAILED,
    EXIT_TRAINING_PAUSED,
    EXIT_PREEMPTED,
    EXIT_INTERRUPTED,
}
PROGRESS = re.compile(
    r"^(?P<what>[^:\r\n]{1,60}): (?P<done>\d+)/(?P<total>\d+)\b(?: (?P<seconds>\d+(?:\.\d+)?) s\b)?(?P<rest>[^\r\n]*)",
    re.MULTILINE,
)
RESUMED = re.compile(r"^[^:\r\n]{1,60}: (resumed at \d+/\d+)$", re.MULTILINE)
METRIC = re.compile(r"(?<!\S)(\S++) ([-+]?(?:\d[\d.]*(?:e[-+]?\d+)?|inf|nan))(?=\s|$)")

# What DVC says of a stage whose files another DVC command reads or writes, and the lines by which
# it names that.
BUSY = "is busy, it is being blocked by:"
HOLDER = re.compile(r"^ *\(PID (\d+)\): (.+)$", re.MULTILINE)
BUSY_SECONDS = 5.0
LOGGER = logging.getLogger(__name__)

Action = Literal["ran", "cached", "failed", "stopped", "skipped"]


@dataclass(frozen=True)
class StageOutcome:
    """How a stage ended. Times are seconds since the epoch.

    Attributes:
        action: ``ran``, ``cached`` (was up to date), ``failed``, ``stopped`` (with the run) or
            ``skipped`` (not started, because another stage failed or the run was stopped).
        work_seconds: the time of the stage's own command where it is known, else that of the whole
            task.
    """

    stage: str
    action: Action
    exit_code: int = 0
    message: str = ""
    started: float = 0.0
    ended: float = 0.0
    work_seconds: float = 0.0

    @classmethod
    def failed(
        cls,
        stage: str,
        message: str,
        exit_code: int = 1,
        *,
        action: Action = "failed",
        started: float | None = None,
        ended: float | None = None,
        work_seconds: float = 0.0,
    ) -> StageOutcome:
        """Return the outcome of a stage that failed, by default now and in no time."""
        ended = time.time() if ended is None else ended
        started = ended if started is None else started
        ended = max(ended, started)  # the clock may have been set back meanwhile
        return cls(stage, action, exit_code, message, started, ended, max(work_seconds, 0.0))

    @classmethod
    def stopped(cls, stage: str, **times: float) -> StageOutcome:
        """Return the outcome of a stage that its run stopped; times as for :meth:`failed`."""
        return cls.failed(stage, "stopped", EXIT_INTERRUPTED, action="stopped", **times)

    @property
    def ok(self) -> bool:
        """Whether the outputs of the stage are there and up to date."""
        return self.action in ("ran", "cached")

    @property
    def line(self) -> str:
        """How the stage ended, for a log."""
        told = "" if self.message == self.action else f" {self.message}"
        return f"{self.stage}: {self.action}{told}".rstrip()

    @property
    def retryable(self) -> bool:
        """Whether the stage crashed, so that a retry may help; its own decisions are final."""
        return self.action == "failed" and self.exit_code not in FINAL_CODES

    @property
    def preempted(self) -> bool:
        """Whether the stage was preempted and should be rescheduled."""
        return self.action == "failed" and self.exit_code == EXIT_PREEMPTED

    def save(self, workspace: Path) -> None:
        """Write the outcome to where :func:`load_outcome` reads it."""
        atomic_write_json(workspace / OUTCOMES / f"{self.stage}.task.json", asdict(self))


@dataclass(frozen=True)
class LoggedProgress:
    """A progress line of a stage: ``done`` steps of ``total``.

    Attributes:
        description: What is counted, such as ``sft``.
        seconds: The time since the loop started, None if the line does not say.
        metrics: What the line ends with, such as ``loss 0.41``; empty without a time.
    """

    line: str
    description: str
    done: int
    total: int
    seconds: float | None
    metrics: Mapping[str, float]


def clear_outcome(workspace: Path, stage: str) -> None:
    """Delete the outcome and the report of an earlier run of the stage."""
    for name in (f"{stage}.task.json", f"{stage}.json"):
        (workspace / OUTCOMES / name).unlink(missing_ok=True)


def load_outcome(workspace: Path, stage: str) -> StageOutcome | None:
    """Return the saved outcome, None if the task died before it could write one."""
    record = _read_record(workspace / OUTCOMES / f"{stage}.task.json")
    return StageOutcome(**record) if record else None


def load_report(workspace: Path, stage: str) -> StageExit | None:
    """Return the report of ``rlhf stage``; None if it was killed, or another command ran."""
    return StageExit.load(outcome_path(workspace / OUTCOMES, stage))


def load_gate_file(
    workspace: Path, outputs: tuple[str, ...]
) -> tuple[Mapping[str, Any], tuple[int, ...]] | None:
    """Return the decision in ``gates/NAME.json`` if that is an output of a stage, and its stamp.

    The stamp differs after the file is written anew, whatever the clock says; compare it for
    equality only.
    """
    for output in outputs:
        path = workspace / output
        if output.startswith("gates/") and output.endswith(".json") and path.is_file():
            status = path.stat()
            times = (status.st_mtime_ns, status.st_ctime_ns)
            return _read_record(path) or {}, (status.st_ino, *times, status.st_size)
    return None


def progress_lines(log_text: str) -> list[LoggedProgress]:
    """Return all progress lines in the text of a stage's log."""
    found = []
    for match in PROGRESS.finditer(log_text):
        done, total = int(match["done"]), int(match["total"])
        seconds = float(match["seconds"]) if match["seconds"] else None
        metrics = {}
        if seconds is not None:
            metrics = {name: float(value) for name, value in METRIC.findall(match["rest"])}
        found.append(LoggedProgress(match[0].strip(), match["what"], done, total, seconds, metrics))
    return found


def last_progress(log_text: str) -> LoggedProgress | None:
    """Return the last progress line in the text of a stage's log, None if there is none."""
    return next(reversed(progress_lines(log_text)), None)


def _read_record(path: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


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
def shown_progress(
    workspace: Path, stage: str, show: Callable[[LoggedProgress], None]
) -> Iterator[None]:
    """Give a stage's newest progress line to ``show`` every ten seconds while the block runs.

    It is called, if the line has changed, in another thread, in the context of this one.
    """
    reader = LogReader(stage_log(workspace, stage))
    ended = threading.Event()

    def follow() -> None:
        said = None
        while True:
            last = ended.wait(PROGRESS_SECONDS)
            progress = last_progress(reader.text(PROGRESS_BYTES))
            if progress is not None and progress != said:
                said = progress
                show(progress)
            if last:
                return

    thread = threading.Thread(
        target=copy_context().run, args=(follow,), name=f"progress-{stage}", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def run_stage(spec: StageSpec) -> StageOutcome:
    """Bring one stage up to date, and save and return its outcome; a failing stage does not raise.

    A raised stop flag stops the stage. If an earlier attempt at the stage still runs, it is waited
    for: a job that was taken for dead may be alive, or its supervisor may still be stopping it. So
    is a `dvc repro` of somebody else that reads or writes the same files.
    """
    try:
        with locked(spec.workspace, f"stages/{spec.name}.lock", wait=True) as lock:
            return _run_locked(spec, lock)
    except KeyboardInterrupt:
        return StageOutcome.stopped(spec.name)


def _run_locked(spec: StageSpec, lock: int) -> StageOutcome:
    """Run the stage; its supervisor holds ``lock`` until every process of the stage has ended."""
    clear_outcome(spec.workspace, spec.name)
    watch = Stopwatch()
    gate_before = load_gate_file(spec.workspace, spec.outputs)
    # The flag belongs before `repro`: without it a stage that ends while another caches its output
    # fails.
    repro = (sys.executable, "-m", "dvc", "--wait-for-lock", "repro", "--single-item", spec.name)
    pull = ("--pull",) if spec.pull else ()
    said = ""
    while True:
        process = start_supervised(
            spec.command or (*repro, *pull),
            name=spec.name,
            cwd=spec.workspace,
            env=child_environment(spec.workspace, **spec.environment),
            log=stage_log(spec.workspace, spec.name),
            grace=spec.grace,
            inherited_descriptors=[lock],
        )
        result = process.result()
        others = _holders(result)
        if not others or load_report(spec.workspace, spec.name) is not None:
            break
        if others != said:
            LOGGER.warning("%s waits for another DVC command: %s", spec.name, others)
            said = others
        if STOP.wait(BUSY_SECONDS):
            break
    gate = load_gate_file(spec.workspace, spec.outputs)
    decision = gate[0] if gate is not None and gate != gate_before else None
    outcome = _outcome(spec, result, decision, watch)
    outcome.save(spec.workspace)
    if result.exit_code == 0:
        KeptResult(spec.workspace, spec.name).drop()  # DVC has recorded it
    return outcome


def _outcome(
    spec: StageSpec,
    result: CommandResult,
    gate_decision: Mapping[str, object] | None,
    watch: Stopwatch,
) -> StageOutcome:
    """Tell how the stage ended, by exit status, its own report and a new gate decision."""
    started, ended = watch.started, watch.now
    report = load_report(spec.workspace, spec.name)
    work_seconds = report.ended - report.started if report is not None else ended - started
    if result.exit_code == 0:
        if spec.command or report is not None or f"Running stage '{spec.name}'" in result.stdout:
            return StageOutcome(
                spec.name, "ran", started=started, ended=ended, work_seconds=work_seconds
            )
        return StageOutcome(spec.name, "cached", started=started, ended=ended)
    if STOP.is_set():
        return StageOutcome.stopped(
            spec.name, started=started, ended=ended, work_seconds=work_seconds
        )
    if report is not None and report.exit_code:
        exit_code, message = report.exit_code, report.message
    elif report is None and gate_decision and gate_decision.get("passed") is False:
        exit_code, message = EXIT_GATE_FAILED, GateDecision.of(spec.name, gate_decision).reasons()
    else:
        exit_code, message = _dvc_failure(result)
    return StageOutcome.failed(
        spec.name, message, exit_code, started=started, ended=ended, work_seconds=work_seconds
    )


def _holders(result: CommandResult) -> str:
    """The commands that hold files for which DVC has not begun the stage; empty if it has."""
    if result.exit_code == 0 or not any(BUSY in error for error in dvc_errors(result.stdout)):
        return ""
    _, _, listed = result.stdout.rpartition(BUSY)
    return ", ".join(f"{command} (process {number})" for number, command in HOLDER.findall(listed))


def _dvc_failure(result: CommandResult) -> tuple[int, str]:
    """Return exit code and message of a stage without report: DVC was killed, or failed."""
    if result.exit_code - 128 in set(signal.Signals):
        return result.exit_code, f"dvc was killed ({signal.Signals(result.exit_code - 128).name})"
    errors = dvc_errors(result.stdout)
    if not errors:
        return 1, f"dvc exited with status {result.exit_code}"
    crashed = any("failed to run" in error or BUSY in error for error in errors)
    return (1 if crashed else EXIT_USER_ERROR), errors[-1]
