"""Cleanup of what a dead run left in a workspace: a table of locks that DVC cannot read, the record of its services.

``python -m flows.workspace.cleanup WORKSPACE`` does it for a command that holds the workspace's lock.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from flows.workspace.services_file import forget_services, running_services


def cleanup(workspace: Path) -> list[str]:
    """Remove what DVC and ``rlhf up`` could not, and return a line on each. The caller holds the workspace's lock.

    DVC takes over the locks of dead processes itself, but refuses every command while ``.dvc/tmp/rwlock`` is no JSON.
    It writes that file in place, so that a DVC that is killed may leave it empty.
    """
    report = []
    locks = workspace / ".dvc" / "tmp" / "rwlock"
    try:
        json.loads(locks.read_text(encoding="utf-8"))
    except OSError:
        pass
    except ValueError:
        locks.unlink(missing_ok=True)
        report.append("removed DVC's table of locks, which a killed DVC had left empty")
    if running_services(workspace) is None:
        forget_services(workspace)
    return report


if __name__ == "__main__":
    cleanup(Path(sys.argv[1]))
