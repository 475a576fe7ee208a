"""The file ``release.html``: the report with what was released in the place that it keeps for that.

DVC knows ``report.html``, which stays as its stage wrote it; this copy is written anew after each decision.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from flows.registry.mlflow_client import RELEASE_PAGE, REPORT_PAGE, connect
from flows.registry.release_page.decision import RunNotes, read_release_decision, version_of_policy
from flows.registry.transactions.aliases import get_version, registry_errors
from flows.workspace.folder import PRIVATE, private_path
from rlhf_core.errors import DataError, RlhfError
from rlhf_core.evaluation.report.parts.release import BEGIN
from rlhf_core.storage.files import atomic_write_json, atomic_write_text, read_json, sha256_file

RECORD = "release.json"


def write_release_page(workspace: Path, notes: RunNotes | None = None) -> Path | None:
    """Write ``release.html`` by what is true now, and attach it to the run that registered the version.

    Args:
        notes: What the run that wrote the report said; None for what it said when the page was written last.

    Returns:
        The page; None where there is no report, or one without a place for it.

    Raises:
        RlhfError: The registry does not answer. A page of the same report stays.
    """
    from rlhf_core.evaluation.report.render import with_release

    report, page = workspace / REPORT_PAGE, workspace / RELEASE_PAGE
    if current_page(workspace) is None:
        page.unlink(missing_ok=True)
    text = report.read_text(encoding="utf-8", errors="replace") if report.is_file() else ""
    if BEGIN not in text:
        return None
    digest = sha256_file(report)
    notes = notes or _kept_notes(workspace, digest)
    decision = read_release_decision(workspace, notes)
    rendered = with_release(text, decision)
    if rendered is None:
        return None
    atomic_write_text(page, rendered)
    record = {"report_sha256": digest, "notes": asdict(notes), "decision": asdict(decision)}
    atomic_write_json(private_path(workspace, RECORD), record)
    _attach(workspace, page, notes)
    return page


def current_page(workspace: Path) -> Path | None:
    """Return ``release.html`` if it was made of the report that is there now; None otherwise."""
    page, report = workspace / RELEASE_PAGE, workspace / REPORT_PAGE
    if not page.is_file() or not report.is_file():
        return None
    try:
        made_of = read_json(workspace / PRIVATE / RECORD).get("report_sha256")
    except DataError:
        return None
    return page if made_of == sha256_file(report) else None


def _kept_notes(workspace: Path, report_sha256: str) -> RunNotes:
    """The notes of the page's last writing if that was of the same report, else none."""
    try:
        record = read_json(workspace / PRIVATE / RECORD)
        return RunNotes(**record["notes"]) if record["report_sha256"] == report_sha256 else RunNotes()
    except (DataError, KeyError, TypeError):
        return RunNotes()


def _attach(workspace: Path, page: Path, notes: RunNotes) -> None:
    """Put the page beside the evidence of the version that it is about, if there is one."""
    here = version_of_policy(workspace, notes)
    if here is None:
        return
    client = connect(workspace)
    run_id = get_version(client, here.model, here.version).run_id
    if run_id:
        with registry_errors(f"attach {page.name} to {here.model} version {here.version}"):
            client.log_artifact(run_id, str(page))


def try_release_page(workspace: Path, notes: RunNotes | None = None) -> str:
    """Write the page; return why it could not be brought up to date, empty if it was or there is no report."""
    try:
        write_release_page(workspace, notes)
    except (RlhfError, OSError) as error:
        return f"{RELEASE_PAGE} was not brought up to date: {error}"
    return ""
