"""The environment of every child process: no telemetry, no prompts, and this installation first on the path."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from flows.supervision.processes import OWNER_VARIABLE, ownership_tag

CHILD_SETTINGS = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DVC_NO_ANALYTICS": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # MLflow's jobs judge traces of language model applications; eight processes of 180 MB wait for them.
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
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


def no_proxy_hosts() -> str:
    """Return the value of ``NO_PROXY`` with the loopback addresses added: local services need no proxy."""
    hosts = [host for host in os.environ.get("NO_PROXY", os.environ.get("no_proxy", "")).split(",") if host]
    return ",".join(dict.fromkeys([*hosts, "127.0.0.1", "localhost"]))


def child_environment(workspace: Path, **extra: str) -> dict[str, str]:
    """Return this process's environment with :data:`CHILD_SETTINGS`, the workspace's ownership tag, and ``extra``."""
    source = str(Path(__file__).resolve().parents[2])
    python_path = [source, *[p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p != source]]
    scripts = str(Path(sys.executable).parent)
    path = os.environ.get("PATH", "")
    return {
        **os.environ,
        **CHILD_SETTINGS,
        "PYTHONPATH": os.pathsep.join(python_path),
        "PATH": path if path.split(os.pathsep)[0] == scripts else os.pathsep.join([scripts, path]),
        "NO_PROXY": no_proxy_hosts(),
        "no_proxy": no_proxy_hosts(),
        OWNER_VARIABLE: ownership_tag(workspace),
        **extra,
    }
