"""Prefect's command line for the services of a run: ``python -m flows.prefect_server.prefect_command server start``.

Its imports and the making of its database take a tenth less time with a garbage collector that seldom runs.
"""

from __future__ import annotations

from rlhf_core.storage.garbage_collection import collect_rarely


def main() -> None:
    """Run Prefect's command with the arguments of this process."""
    collect_rarely()
    from prefect.cli import app

    app()


if __name__ == "__main__":
    main()
