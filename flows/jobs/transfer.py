"""Transfers between a workspace and a DVC remote: runs ``flows.jobs.transfer_worker`` in a supervised process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from flows.jobs.transfer_worker import ANSWER, EXIT_REFUSED, TransferAnswer
from flows.supervision.environment import child_environment
from flows.supervision.processes import run_supervised
from flows.supervision.retry import retry
from flows.supervision.signals import STOP, StopRequested
from flows.workspace.folder import private_path


class TransferFailed(Exception):
    """A transfer failed; ``final`` where trying again would not help."""

    def __init__(self, message: str, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


def transfer(workspace: Path, command: str, stage: str = "", remote: str = "") -> TransferAnswer:
    """Run one command of ``flows.jobs.transfer_worker``; its output goes to ``.rlhf/logs/STAGE.transfer.log``.

    Raises:
        TransferFailed: with the remote's own message.
        StopRequested: the stop flag was raised.
    """
    log = private_path(workspace, "logs", f"{stage or 'remote'}.transfer.log")
    result = run_supervised(
        [sys.executable, "-m", "flows.jobs.transfer_worker", command, str(workspace), stage, remote],
        name=command,
        cwd=workspace,
        env=child_environment(workspace),
        log=log,
    )
    if STOP.is_set():
        raise StopRequested
    answers = [line.removeprefix(ANSWER) for line in result.output.splitlines() if line.startswith(ANSWER)]
    answer = TransferAnswer(**json.loads(answers[-1])) if answers else TransferAnswer()
    if result.exit_code:
        message = answer.error or f"the transfer exited with status {result.exit_code}; see {log}"
        raise TransferFailed(message, final=result.exit_code == EXIT_REFUSED)
    return answer


def transfer_with_retries(
    workspace: Path, command: str, stage: str, remote: str, seconds: float, report: Callable[[str], None]
) -> TransferAnswer:
    """Run :func:`transfer`, again for ``seconds`` while the remote is out of reach; ``report`` gets each failure."""
    return retry(
        lambda: transfer(workspace, command, stage, remote),
        seconds,
        is_transient=lambda error: isinstance(error, TransferFailed) and not error.final,
        report=report,
    )
