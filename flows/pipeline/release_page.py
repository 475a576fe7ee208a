"""The last step of a run: the report once more, with what was registered and promoted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from flows.pipeline.verdict import NOTHING, RegistrationResult, RunVerdict
from flows.registry.client import RELEASE_PAGE
from flows.registry.release_page import RunNotes, current_page, try_release_page


def with_release_page(workspace: Path, verdict: RunVerdict, registration: RegistrationResult) -> tuple[RunVerdict, str]:
    """Write ``release.html`` and let the verdict name it as the run's report.

    Returns:
        The verdict, and why the page could not be written; empty if it was, or the run has no report.
    """
    notes = RunNotes(
        nothing_because="" if registration.registered else verdict.registered.removeprefix(NOTHING),
        registered=registration.registered,
        promotion=verdict.promotion,
    )
    problem = try_release_page(workspace, notes)
    written = verdict.report is not None and current_page(workspace) is not None
    return (replace(verdict, report=RELEASE_PAGE) if written and not problem else verdict), problem
