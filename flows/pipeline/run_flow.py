"""The pipeline flow in a process of its own: ``python -m flows.pipeline.run_flow WORKSPACE [--no-promote]``.

A process that ends with the flow exits at once; the one that owns the services shows and sums up.
"""

from __future__ import annotations

import sys

from flows.pipeline.flow import rlhf_pipeline


def main(argv: list[str]) -> int:
    """Status 0 if the run completed, else 1; the details are in the events file and on the server."""
    state = rlhf_pipeline(argv[0], promote="--no-promote" not in argv, return_state=True)
    return 0 if state.is_completed() else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
