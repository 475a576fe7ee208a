"""One rank of a stage that runs on several. The launcher starts it, never a user."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from pathlib import Path

PR_SET_PDEATHSIG = 1


def main(name: str, workspace: str, parent: str) -> int:
    """Run stage ``name`` as the rank that the environment describes, and return its exit code.

    The process is killed when process ``parent`` dies.
    """
    _die_with(int(parent))
    from rlhf_core.errors import EXIT_INTERRUPTED, EXIT_OK, RlhfError
    from rlhf_core.stages.runtime.rank_watch import show_stack_on_signal
    from rlhf_core.stages.runtime.runner import run_stage
    from rlhf_core.storage.garbage_collection import collect_rarely

    collect_rarely()
    show_stack_on_signal()
    try:
        run_stage(name, Path(workspace))
    except RlhfError as error:
        # The launcher reports it once for all ranks.
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception:
        print(
            f"rank {os.environ.get('RANK')}:\n{traceback.format_exc()}", file=sys.stderr, flush=True
        )
        return 1
    return EXIT_OK


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when ``parent`` dies.

    A rank in a collective sleeps in C++, where only SIGKILL reaches it.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
