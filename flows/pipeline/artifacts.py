"""Prefect artifacts of a run: stage table, gate tables, link to the report, progress of a running stage."""

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
from flows.supervision.log_reader import LogReader
from rlhf_core.files import read_json

TAIL_BYTES = 8192


def artifact_key(*parts: str) -> str:
    """Return a valid artifact key: lowercase letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")


def publish_stage_table(outcomes: Iterable[StageOutcome]) -> None:
    """Create a table with a row per stage: its result, duration and message."""
    rows: list[dict[str, Any]] = [
        {"stage": o.stage, "result": o.action, "seconds": round(o.ended - o.started, 1), "message": o.message}
        for o in outcomes
    ]
    create_table_artifact(rows, key="stages", description="Stages of this run")


def publish_gate_tables(workspace: Path) -> None:
    """Create a table of conditions for each gate that has left evidence."""
    for path in sorted((workspace / "gates").glob("*.json")):
        gate = read_json(path)
        rows = [
            {key: condition.get(key) for key in ("metric", "value", "bound", "passed", "why")}
            for condition in gate.get("conditions", [])
        ]
        verdict = "passed" if gate.get("passed") else "FAILED"
        create_table_artifact(rows, key=artifact_key("gate", path.stem), description=f"Gate {path.stem}: {verdict}")


def publish_report_link(workspace: Path) -> None:
    """Create a link to the report, if there is one."""
    report = workspace / "report.html"
    if report.is_file():
        create_link_artifact(report.as_uri(), link_text="report.html", key="report", description=str(report))


class ProgressArtifact:
    """A progress artifact that follows the progress lines in the log of a stage."""

    def __init__(self, workspace: Path, stage: str) -> None:
        self.stage = stage
        self.appended = LogReader(stage_log(workspace, stage))
        self.artifact: UUID | None = None
        self.percent = -1.0

    def update(self) -> None:
        """Create the artifact, or update it when the log shows progress."""
        progress = last_progress(self.appended.text(TAIL_BYTES))
        if progress is None:
            return
        percent = min(100.0, 100.0 * progress.done / max(progress.total, 1))
        if self.artifact is None:
            key = artifact_key("progress", self.stage)
            self.artifact = cast(UUID, create_progress_artifact(percent, key=key, description=progress.line))
        elif percent != self.percent:
            update_progress_artifact(self.artifact, percent, description=progress.line)
        self.percent = percent
