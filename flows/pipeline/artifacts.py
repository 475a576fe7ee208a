"""What the Prefect UI shows of a run: stage table, gate tables, the report's address, progress of a running stage."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast
from uuid import UUID

from prefect.artifacts import (
    create_link_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)

from flows.stage.outcome import StageOutcome, last_progress
from flows.stage.run import stage_log
from rlhf_core.files import read_json

TAIL_BYTES = 8192


def artifact_key(*parts: str) -> str:
    """A key of lowercase letters, digits and dashes, as Prefect wants it."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")


def stage_table(outcomes: Iterable[StageOutcome]) -> None:
    """One row per stage: what happened and how long it took."""
    rows: list[dict[str, Any]] = [
        {"stage": o.stage, "result": o.action, "seconds": round(o.ended - o.started, 1), "message": o.message}
        for o in outcomes
    ]
    create_table_artifact(rows, key="stages", description="Stages of this run")


def gate_tables(workspace: Path) -> None:
    """One table per gate that has left evidence."""
    for path in sorted((workspace / "gates").glob("*.json")):
        gate = read_json(path)
        rows = [
            {key: row.get(key) for key in ("metric", "value", "bound", "passed", "why")}
            for row in gate.get("conditions", [])
        ]
        verdict = "passed" if gate.get("passed") else "FAILED"
        create_table_artifact(rows, key=artifact_key("gate", path.stem), description=f"Gate {path.stem}: {verdict}")


def report_link(workspace: Path) -> None:
    """The address of the report, if there is one."""
    report = workspace / "report.html"
    if report.is_file():
        create_link_artifact(report.as_uri(), link_text="report.html", key="report", description=str(report))


class StageProgress:
    """A progress artifact that follows the progress lines in a stage's log."""

    def __init__(self, workspace: Path, stage: str) -> None:
        self.stage = stage
        self.log = stage_log(workspace, stage)
        self.offset = self.log.stat().st_size if self.log.exists() else 0
        self.artifact: UUID | None = None
        self.shown = -1.0

    def update(self) -> None:
        """Create or move the artifact when the log has something new."""
        found = last_progress(self._tail())
        if found is None:
            return
        done, total, line = found
        percent = min(100.0, 100.0 * done / max(total, 1))
        if self.artifact is None:
            key = artifact_key("progress", self.stage)
            self.artifact = cast(UUID, create_progress_artifact(percent, key=key, description=line))
        elif percent != self.shown:
            update_progress_artifact(self.artifact, percent, description=line)
        self.shown = percent

    def _tail(self) -> str:
        if not self.log.exists():
            return ""
        with self.log.open("rb") as stream:
            stream.seek(max(self.offset, self.log.stat().st_size - TAIL_BYTES))
            return stream.read().decode("utf-8", errors="replace")
