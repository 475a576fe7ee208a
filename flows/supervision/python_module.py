"""Short Python commands in a child process, where their slow imports and process-ending errors do no harm."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flows.supervision.environment import child_environment

ERROR_PREFIX = "ERROR: "


@dataclass(frozen=True)
class ModuleResult:
    """Exit status and output of a module that has ended."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def error_line(self) -> str:
        """The line that explains a failure: DVC's last ``ERROR:`` line, else the last line of stderr or stdout."""
        lines = [line.strip() for line in [*self.stdout.splitlines(), *self.stderr.splitlines()] if line.strip()]
        return [f"exit code {self.exit_code}", *lines, *dvc_errors(self.stderr)][-1]


def dvc_errors(output: str) -> list[str]:
    """Return the lines in which DVC reports errors, without their prefix ``ERROR:``."""
    return [line.removeprefix(ERROR_PREFIX) for line in output.splitlines() if line.startswith(ERROR_PREFIX)]


def run_module(workspace: Path, module: str, *arguments: str, env: Mapping[str, str] | None = None) -> ModuleResult:
    """Run ``python -m MODULE ARGUMENTS`` in ``workspace``, detached from the terminal, with ``env`` on top."""
    process = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=workspace,
        env={**child_environment(workspace), **(env or {})},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    return ModuleResult(process.returncode, process.stdout, process.stderr)
