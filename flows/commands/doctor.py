"""``rlhf doctor``: check the installation and the workspace, and say how to repair what fails."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from flows.commands.checks import FAIL, OK, WARN, DoctorCheck
from flows.commands.checks.machine import machine_checks
from flows.commands.checks.services import service_checks
from flows.commands.checks.workspace import workspace_checks
from rlhf_core.errors import EXIT_OK, EXIT_USER_ERROR

MARKS = {OK: "ok  ", WARN: "warn", FAIL: "FAIL"}


def doctor(workspace: Path | None = None) -> tuple[str, int]:
    """Check the machine, the services and, if there is one, the workspace.

    Nothing is changed, but for a temporary file that tests whether the workspace can be written to.

    Returns:
        The text, one line per check, and the exit status: 2 if a check failed, else 0. Warnings do not count.
    """
    console = Console(stderr=True, force_terminal=sys.stderr.isatty())
    with console.status("checking the machine, the services and the workspace"):
        checks = [*machine_checks(), *service_checks(), *workspace_checks(workspace)]
    width = max(len(check.name) for check in checks)
    lines = [_line(check, width) for check in checks]
    failed = sum(check.level == FAIL for check in checks)
    warned = sum(check.level == WARN for check in checks)
    lines.append(f"{len(checks)} checks: {failed} failed, {warned} warnings")
    return "\n".join(lines), EXIT_USER_ERROR if failed else EXIT_OK


def _line(check: DoctorCheck, width: int) -> str:
    remedy = f" → {check.remedy}" if check.remedy else ""
    return f"{MARKS[check.level]}  {check.name.ljust(width)}  {check.finding}{remedy}"
