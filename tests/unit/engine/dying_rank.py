"""A rank that is killed in the middle of optimiser step 5, if it is the second one; otherwise like any other.

It waits for the checkpoint of step 3.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from rlhf_core.stages.runtime import rank
from rlhf_core.training.engine import LocalEngine, StepResult

STEP = 5
_original = LocalEngine.step


def step_or_die(engine: LocalEngine) -> StepResult:
    if engine.steps == STEP and os.environ["RANK"] == "1":
        while not list(Path(sys.argv[2]).glob("work/sft/*/checkpoints/step-000003")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    return _original(engine)


LocalEngine.step = step_or_die  # type: ignore[method-assign]

if __name__ == "__main__":
    sys.exit(rank.main(*sys.argv[1:]))
