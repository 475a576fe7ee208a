"""Commands run as a user would run them, and what a finished smoke run is."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

ROOT = Path(__file__).resolve().parents[2]
SHARED_DATA = ROOT.parent / "shared" / "data"
OFFLINE = {
    "DVC_NO_ANALYTICS": "1",
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "GX_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "HF_HUB_OFFLINE": "1",
    # Idle threads that spin bring a busy machine to a halt, and models this small gain nothing from
    # a second one.
    "OMP_WAIT_POLICY": "PASSIVE",
    "OMP_NUM_THREADS": "1",
    # Seconds in which passes are tried belong to no test but that of the forecast of time.
    "RLHF_PROBE": "0",
}


def command_environment(**extra: str) -> dict[str, str]:
    """The environment of a user's shell with the virtual environment active."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**os.environ, **OFFLINE, "PATH": path, "COLUMNS": "200", **extra}


def command_tree() -> Any:
    """The whole command line with the commands of extras, as click's objects."""
    from flows.cli import app

    tree: Any = typer.main.get_command(app)
    tree.mount_plugins(typer.Context(tree, info_name="rlhf"))
    return tree


def run(
    *words: str | Path, cwd: Path, timeout: float = 300, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Run a command as a user would and return it with its output, whatever its exit code."""
    return subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=command_environment(**extra),
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
    )


@dataclass(frozen=True)
class SmokeRun:
    """A finished smoke run: its workspace (read-only for tests) and what the command printed."""

    workspace: Path
    completed: subprocess.CompletedProcess[str]
