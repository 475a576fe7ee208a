"""Environment of everything that is started: no telemetry, no surprises, this very installation on the path."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from flows.supervision.processes import OWNER_VARIABLE, ownership_tag

QUIET = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DVC_NO_ANALYTICS": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "GX_ANALYTICS_ENABLED": "false",
    "GIT_TERMINAL_PROMPT": "0",
    "PREFECT_CLI_PROMPT": "false",
    "PREFECT_CLI_COLORS": "false",
    "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
    "PREFECT_WORKER_QUERY_SECONDS": "1",
    "PREFECT_WORKER_HEARTBEAT_SECONDS": "10",
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    "PYTHONUNBUFFERED": "1",
}


def without_proxy() -> str:
    """``NO_PROXY`` with loopback in it: what is started here is never reached through a proxy."""
    hosts = [host for host in os.environ.get("NO_PROXY", os.environ.get("no_proxy", "")).split(",") if host]
    return ",".join(dict.fromkeys([*hosts, "127.0.0.1", "localhost"]))


def child_environment(workspace: Path, **extra: str) -> dict[str, str]:
    """This process's environment with the switches, the workspace's mark of ownership, and ``extra``."""
    source = str(Path(__file__).resolve().parents[2])
    paths = [source, *[p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p != source]]
    binaries = str(Path(sys.executable).parent)
    path = os.environ.get("PATH", "")
    return {
        **os.environ,
        **QUIET,
        "PYTHONPATH": os.pathsep.join(paths),
        "PATH": path if path.split(os.pathsep)[0] == binaries else os.pathsep.join([binaries, path]),
        "NO_PROXY": without_proxy(),
        "no_proxy": without_proxy(),
        OWNER_VARIABLE: ownership_tag(workspace),
        **extra,
    }
