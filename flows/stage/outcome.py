"""How a stage ended: what the flow decides on, written beside the run so that a job on a pool can report it too."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flows.workspace.folder import PRIVATE, private_path
from rlhf_core.errors import (
    EXIT_GATE_FAILED,
    EXIT_INTERRUPTED,
    EXIT_PREEMPTED,
    EXIT_TRAINING_PAUSED,
    EXIT_USER_ERROR,
)
from rlhf_core.files import atomic_write_json

OUTCOMES = "outcomes"
# Preempted stages are run again before anybody asks for a retry.
FINAL_CODES = {EXIT_USER_ERROR, EXIT_GATE_FAILED, EXIT_TRAINING_PAUSED, EXIT_PREEMPTED, EXIT_INTERRUPTED}
PROGRESS = re.compile(r"^(?P<what>[^:\r\n]{1,60}): (?P<done>\d+)/(?P<total>\d+)\b(?P<rest>[^\r\n]*)", re.MULTILINE)


@dataclass(frozen=True)
class StageOutcome:
    """``action`` is ran, cached, failed, stopped or skipped. Times are seconds since the epoch.

    ``work`` is the time of the stage's own command where it is known, else the whole time of the task.
    """

    stage: str
    action: str
    exit_code: int
    message: str
    started: float
    ended: float
    work: float

    @property
    def ok(self) -> bool:
        """Whether what the stage makes is now there."""
        return self.action in ("ran", "cached")

    @property
    def retryable(self) -> bool:
        """A crash may be tried again; a verdict of the stage itself may not."""
        return self.action == "failed" and self.exit_code not in FINAL_CODES

    @property
    def preempted(self) -> bool:
        """Whether the stage gave its place up at somebody's wish, and waits to be run again."""
        return self.action == "failed" and self.exit_code == EXIT_PREEMPTED

    def save(self, workspace: Path) -> None:
        """Write it where :func:`load_outcome` finds it."""
        atomic_write_json(private_path(workspace, OUTCOMES, f"{self.stage}.task.json"), asdict(self))


def clear_outcome(workspace: Path, stage: str) -> None:
    """Forget how the stage ended last time."""
    for name in (f"{stage}.task.json", f"{stage}.json"):
        (workspace / PRIVATE / OUTCOMES / name).unlink(missing_ok=True)


def load_outcome(workspace: Path, stage: str) -> StageOutcome | None:
    """The saved outcome, or None if the task died before it could write one."""
    record = _read(workspace / PRIVATE / OUTCOMES / f"{stage}.task.json")
    return StageOutcome(**record) if record else None


def stage_report(workspace: Path, stage: str) -> dict[str, Any] | None:
    """What ``rlhf stage`` itself said: ``{exit_code, message[, seconds]}``; None if it was killed."""
    return _read(workspace / PRIVATE / OUTCOMES / f"{stage}.json")


def gate_evidence(workspace: Path, outputs: tuple[str, ...]) -> tuple[dict[str, Any] | None, object]:
    """The gate evidence among a stage's outputs (``gates/NAME.json``), and a mark that differs once it is written anew.

    The mark is compared for equality only: the times in it may be those of a clock that was set since.
    """
    for output in outputs:
        path = workspace / output
        if output.startswith("gates/") and output.endswith(".json") and path.is_file():
            status = path.stat()
            return _read(path), (status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size)
    return None, None


def failed_conditions(report: Mapping[str, Any]) -> str:
    """The conditions that failed, in one line."""
    failed = [c for c in report.get("conditions", []) if not c.get("passed")]
    return "; ".join(f"{c.get('metric')} is {c.get('value')}, bound {c.get('bound')}" for c in failed)


def last_progress(text: str) -> tuple[int, int, str] | None:
    """The last progress line in a stage's log: ``(done, total, the line)``."""
    lines = list(PROGRESS.finditer(text))
    return (int(lines[-1]["done"]), int(lines[-1]["total"]), lines[-1][0].strip()) if lines else None


def _read(path: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None
