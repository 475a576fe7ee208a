"""Asking DVC something in a process of its own: its modules are slow to load and its errors end the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from flows.supervision.environment import child_environment


def query(workspace: Path, *arguments: str) -> tuple[str, str | None]:
    """``python ARGUMENTS`` in the workspace: what it printed, and one line of complaint if it failed, else None."""
    answer = subprocess.run(
        [sys.executable, *arguments],
        cwd=workspace,
        env=child_environment(workspace),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    return answer.stdout, _complaint(answer) if answer.returncode else None


def _complaint(answer: subprocess.CompletedProcess[str]) -> str:
    """The line in which DVC says ERROR, else the last one."""
    lines = [line for line in answer.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return next(iter([*errors, *lines[-1:]]), f"exit code {answer.returncode}")
