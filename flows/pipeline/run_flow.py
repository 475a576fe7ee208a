"""The pipeline flow in a process of its own: ``python -m flows.pipeline.run_flow WORKSPACE [--no-promote]``.

The process ends with the flow; the command that started it owns the services and shows progress and summary.
"""

from __future__ import annotations

import sys

from flows.pipeline.flow import rlhf_pipeline
from rlhf_core.storage.garbage_collection import skip_last_collection


def main(argv: list[str]) -> int:
    """Run the flow; return 0 if it completed, else 1. The details are in the events file and on the server."""
    skip_last_collection()
    state = rlhf_pipeline(argv[0], promote="--no-promote" not in argv, return_state=True)
    return 0 if state.is_completed() else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
