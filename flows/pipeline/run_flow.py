"""The pipeline flow in its own process: ``python -m flows.pipeline.run_flow WORKSPACE --after FILE [--no-promote]``.

The process ends with the flow; the command that started it owns the services and shows progress and summary. It loads
Prefect and MLflow and makes MLflow's schema while they start, and begins once FILE exists.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from rlhf_core.storage.garbage_collection import paused_collector, skip_last_collection

POLL_SECONDS = 0.05


def main(argv: list[str]) -> int:
    """Run the flow; return 0 if it completed, else 1. The details are in the events file and on the server."""
    parser = argparse.ArgumentParser(prog="flows.pipeline.run_flow", description=__doc__)
    parser.add_argument("workspace")
    parser.add_argument("--after", type=Path, required=True)
    parser.add_argument("--no-promote", action="store_true")
    given = parser.parse_args(argv)
    skip_last_collection()
    with paused_collector():
        from flows.pipeline.flow import rlhf_pipeline
        from flows.registry.mlflow_client import load_mlflow

        load_mlflow()
    _prepare_record(Path(given.workspace))
    parent = os.getppid()
    while not given.after.exists():
        if os.getppid() != parent:
            return 1  # whoever would have made the file has died
        time.sleep(POLL_SECONDS)
    state = rlhf_pipeline(given.workspace, promote=not given.no_promote, return_state=True)
    return 0 if state.is_completed() else 1


def _prepare_record(workspace: Path) -> None:
    """Make MLflow's schema where the flow will open a run. What is wrong with the workspace the flow itself says."""
    from flows.dvc_repo.graph import read_graph
    from flows.pipeline.unchanged import has_gated_policy
    from flows.registry.mlflow_client import prepare_tracking

    with suppress(Exception):
        if has_gated_policy(read_graph(workspace)):
            prepare_tracking(workspace)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
