"""Prefect artifacts of a run: verdict, stages, gates, report, and progress of a running stage."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast
from uuid import UUID

from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)

from flows.pipeline.record import describe_run
from flows.pipeline.verdict import RunVerdict, verdict_markdown
from flows.registry.client import connect, experiment_id, mlflow_address
from flows.stage import LoggedProgress, StageOutcome
from flows.workspace import workspace_slug
from rlhf_core.evaluation.remedies import remedy_for
from rlhf_core.gates import read_gates
from rlhf_core.tracking.pipeline_run import REPORT_PAGE, log_final_artifacts, run_page

# What Markdown would read as markup, and what looks like it.
LOOK_ALIKES = {">=": "≥", "<=": "≤", "<": "‹", ">": "›", "*": "∗", "`": "ˋ", "](": "] ("}


def artifact_key(workspace: Path, *parts: str) -> str:
    """Return an artifact key of lowercase letters, digits and dashes for all runs of a workspace."""
    name = "-".join([*parts, workspace_slug(workspace)]).lower()
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")


def table_cell(text: str) -> str:
    """Return ``text`` on one line in characters that mean nothing to Markdown.

    Prefect's first UI renders the cells of a table as Markdown, its second shows them as they are,
    so that neither escaped nor raw markup suits both.
    """
    cell = " ".join(text.split())
    for characters, replacement in LOOK_ALIKES.items():
        cell = cell.replace(characters, replacement)
    return cell


def publish_stage_table(workspace: Path, outcomes: Iterable[StageOutcome]) -> None:
    """Create a table with a row per stage: its result, duration and message."""
    rows: list[dict[str, Any]] = []
    for outcome in outcomes:
        row = {
            "stage": outcome.stage,
            "result": outcome.action,
            "seconds": round(outcome.ended - outcome.started, 1),
            "message": table_cell(outcome.message),
        }
        rows.append(row)
    key = artifact_key(workspace, "stages")
    create_table_artifact(rows, key=key, description="Stages of this run")


def publish_gate_tables(workspace: Path) -> None:
    """Create a table of conditions, failures first, for each gate that has left evidence."""
    for gate in read_gates(workspace):
        rows = []
        for condition in gate.failures_first:
            remedy = "" if condition.passed else str(remedy_for(gate, condition))
            row = {
                "metric": condition.metric,
                "passed": "yes" if condition.passed else "NO",
                "value": condition.measured,
                "bound": condition.required,
                "why": table_cell(condition.why),
                "what to do": table_cell(remedy),
            }
            rows.append(row)
        described = f"Gate {gate.name}: {gate.verdict}"
        key = artifact_key(workspace, "gate", gate.name)
        create_table_artifact(rows, key=key, description=described)


def publish_report(workspace: Path, report: Path, report_link: str | None) -> None:
    """If there is a report, create a link to it, or a note of its path where no server shows it.

    Browsers do not follow links from a served page to a local file.
    """
    if not report.is_file():
        return
    key = artifact_key(workspace, "report")
    if report_link:
        create_link_artifact(report_link, link_text=report.name, key=key, description=str(report))
    else:
        create_markdown_artifact(
            f"The report is the file `{report}`.", key=key, description=str(report)
        )


def publish_run(
    workspace: Path,
    run_id: str | None,
    outcomes: Mapping[str, StageOutcome],
    verdict: RunVerdict | None,
) -> None:
    """Show stages, gates, verdict and report on the Prefect server, and on the run in MLflow.

    The report is the one that the verdict names, which says what was released.
    """
    report = verdict.report if verdict is not None and verdict.report else REPORT_PAGE
    page = run_page(experiment_id(connect(workspace), workspace), run_id, report) if run_id else ""
    address = mlflow_address(workspace)
    report_link = f"{address}/{page}" if address and page else None
    publish_stage_table(workspace, list(outcomes.values()))
    publish_gate_tables(workspace)
    publish_report(workspace, workspace / report, report_link)
    if verdict is not None:
        create_markdown_artifact(
            verdict_markdown(verdict, report_link),
            key=artifact_key(workspace, "verdict"),
            description=f"Verdict: {verdict.headline}",
        )
    if run_id:
        log_final_artifacts(connect(workspace), run_id, workspace, page=report)
        if verdict is not None:
            # Relative, for the address of the UI changes from one `rlhf up` to the next.
            describe_run(workspace, run_id, verdict.headline, verdict_markdown(verdict, page))


class ProgressArtifact:
    """A progress artifact of a stage, made when there is progress to show."""

    def __init__(self, workspace: Path, stage: str) -> None:
        self.key = artifact_key(workspace, "progress", stage)
        self.artifact: UUID | None = None

    def show(self, progress: LoggedProgress) -> None:
        """Create or update the artifact."""
        percent = min(100.0, 100.0 * progress.done / max(progress.total, 1))
        if self.artifact is None:
            self.artifact = cast(
                UUID, create_progress_artifact(percent, key=self.key, description=progress.line)
            )
        else:
            update_progress_artifact(self.artifact, percent, description=progress.line)
