"""Runs ``flows.jobs.transfer_worker`` under the guard, and tries again for a while where the remote does not answer."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flows.jobs.transfer_worker import ANSWER
from flows.stage.run import wait_for
from flows.supervision.environment import child_environment
from flows.supervision.processes import start_supervised
from flows.supervision.signals import STOP
from flows.workspace.folder import private_path

FIRST_PAUSE_SECONDS = 2.0
LONGEST_PAUSE_SECONDS = 60.0


class TransferFailed(Exception):
    """Why nothing could be exchanged. ``final``: trying again would not help."""

    def __init__(self, message: str, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


class TransferStopped(Exception):
    """The stop flag ended a transfer, or the waiting between two."""


def transfer(workspace: Path, command: str, stage: str = "", remote: str = "") -> dict[str, Any]:
    """The answer of ``flows.jobs.transfer_worker``; its output is in ``.rlhf/logs/STAGE.transfer.log``."""
    log = private_path(workspace, "logs", f"{stage or 'remote'}.transfer.log")
    offset = log.stat().st_size if log.exists() else 0
    words = [sys.executable, "-m", "flows.jobs.transfer_worker", command, str(workspace), stage, remote]
    supervised = start_supervised(words, name=command, cwd=workspace, env=child_environment(workspace), log=log)
    status = wait_for(supervised)
    if STOP.is_set():
        raise TransferStopped
    text = log.read_bytes()[offset:].decode("utf-8", errors="replace")
    answers = [line.removeprefix(ANSWER) for line in text.splitlines() if line.startswith(ANSWER)]
    answer: dict[str, Any] = json.loads(answers[-1]) if answers else {}
    if status:
        raise TransferFailed(answer.get("error") or f"ended with status {status}; see {log}", final=status == 2)
    return answer


def patiently(attempt: Callable[[], dict[str, Any]], seconds: float, tell: Callable[[str], None]) -> dict[str, Any]:
    """The answer of ``attempt``, tried for ``seconds`` with growing pauses; then its last :class:`TransferFailed`."""
    deadline = time.monotonic() + seconds
    pause = FIRST_PAUSE_SECONDS
    while True:
        try:
            return attempt()
        except TransferFailed as failure:
            if failure.final or time.monotonic() + pause > deadline:
                raise
            tell(f"{failure}; trying again in {pause:.0f} s")
        if STOP.wait(pause):
            raise TransferStopped
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
