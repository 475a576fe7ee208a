"""A rank that, if it is the second one, meets the fault that its first argument names, amid
optimiser step 5.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from torch import OutOfMemoryError

TESTS = Path(__file__).resolve().parents[2]
sys.path[:1] = [str(TESTS), str(TESTS / "support")]
from unit.training.tiny import at_step, die_behind  # noqa: E402

from rlhf_core.stages.runtime import rank  # noqa: E402
from rlhf_core.training.engine.base import LocalEngine  # noqa: E402


def stopped() -> None:
    """Have the launcher told to stop, and wait until it has forwarded that."""
    os.kill(os.getppid(), signal.SIGTERM)
    preemption: Any = signal.getsignal(signal.SIGTERM)
    while not preemption.__self__.received:
        time.sleep(0.01)


def hangs() -> None:
    """Sleep where no safe point follows."""
    time.sleep(10_000)


def hangs_when_stopped() -> None:
    """Have the launcher told to stop, and sleep."""
    stopped()
    hangs()


def runs_out_of_memory() -> None:
    """As torch does on a GPU."""
    raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 1 is full.")


if __name__ == "__main__":
    fault, *arguments = sys.argv[1:]
    faults = {
        "killed": partial(die_behind, "step-000003", Path(arguments[1]) / "work"),
        "stopped": stopped,
        "hangs": hangs,
        "hangs when stopped": hangs_when_stopped,
        "out of memory": runs_out_of_memory,
    }
    if os.environ["RANK"] == "1":
        LocalEngine.step = at_step(5, faults[fault])  # type: ignore[assignment,method-assign]
    sys.exit(rank.main(*arguments))
