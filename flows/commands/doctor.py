"""``rlhf doctor``: what is missing or misconfigured, and what to do about each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from flows.commands.checks import FAIL, OK, WARN, DoctorCheck
from flows.commands.checks.machine import machine_checks
from flows.commands.checks.services import service_checks
from flows.commands.checks.workspace import workspace_checks
from rlhf_core.errors import EXIT_OK, EXIT_USER_ERROR

MARKS = {OK: "ok  ", WARN: "warn", FAIL: "FAIL"}


def doctor(workspace: Path | None = None) -> tuple[str, int]:
    """Check machine, services and, where there is one, the workspace.

    Returns the text, one line per check, and the exit code: 0, or 2 when a check failed. Warnings do not fail. Nothing
    is changed but for a temporary file that tries whether the workspace can be written to.
    """
    checks = list(_collect(workspace))
    width = max(len(check.name) for check in checks)
    lines = [_line(check, width) for check in checks]
    failed = sum(check.level == FAIL for check in checks)
    warned = sum(check.level == WARN for check in checks)
    lines.append(f"{len(checks)} checks: {failed} failed, {warned} warnings")
    return "\n".join(lines), EXIT_USER_ERROR if failed else EXIT_OK


def _collect(workspace: Path | None) -> Iterator[DoctorCheck]:
    groups: list[Callable[[Path | None], Iterator[DoctorCheck]]] = [machine_checks, service_checks, workspace_checks]
    for group in groups:
        yield from group(workspace)


def _line(check: DoctorCheck, width: int) -> str:
    remedy = f" → {check.remedy}" if check.remedy else ""
    return f"{MARKS[check.level]}  {check.name.ljust(width)}  {check.finding}{remedy}"
