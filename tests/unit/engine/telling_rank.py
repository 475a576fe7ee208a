"""A rank that, if it is the second one, has its launcher told to stop in the middle of optimiser step 5."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from rlhf_core.stages.runtime import rank
from rlhf_core.training.engine import LocalEngine, StepResult

STEP = 5
_original = LocalEngine.step


def tell_and_step(engine: LocalEngine) -> StepResult:
    if engine.steps == STEP and os.environ["RANK"] == "1":
        os.kill(os.getppid(), signal.SIGTERM)
        preemption: Any = signal.getsignal(signal.SIGTERM)
        while not preemption.__self__.received:  # until the launcher has forwarded it
            time.sleep(0.01)
    return _original(engine)


LocalEngine.step = tell_and_step  # type: ignore[method-assign]

if __name__ == "__main__":
    sys.exit(rank.main(*sys.argv[1:]))
