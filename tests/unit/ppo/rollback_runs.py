"""PPO runs that roll back twice; run as a script, they are killed at each of ``MOMENTS`` and then finished.

Every run is a process of its own, forked from one that has only imported: that saves the imports and nothing else.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from unit.ppo.tiny import make_config, make_tiny, make_trainer

from rlhf_core.config.health import Check, Rule
from rlhf_core.config.ppo import PpoConfig
from rlhf_core.ppo.checkpoints import RollbackJournal
from rlhf_core.training.checkpoints import checkpoint
from rlhf_core.training.checkpoints.manager import RunCheckpoints
from rlhf_core.training.history import History
from rlhf_core.training.rng import seed_everything

ITERATIONS = 6


def rule(*checks: Check, action: Any = "rollback", after: int = 1, name: str = "told") -> Rule:
    """A rule that doubles the KL coefficient and halves the rates."""
    adjust = (("kl_coefficient", 2.0), ("lr", 0.5))
    return Rule(name, checks, "critical", action, "it was told to", "a test", "none", after, adjust)


def config_with(iterations: int, keep: int = 2, mode: str = "enforce", **changes: Any) -> PpoConfig:
    """Checkpoints and selections every two iterations."""
    return make_config(iterations=iterations, health={"mode": mode}, checkpoint={"every": 2, "keep": keep}, **changes)


def run(work: Path) -> None:
    """Rolls back at 3 (to the start) while the coefficient is below 0.07, and at 5 (to 2) while it is below 0.15."""
    seed_everything(1)
    rules = [
        rule(Check("kl_coefficient", "<", 0.07, window=1), after=3),
        rule(Check("kl_coefficient", "<", 0.15, window=1), after=5, name="later"),
    ]
    make_trainer(make_tiny(), config_with(ITERATIONS, keep=1), work, rules=rules).run()


def die() -> None:
    """As kill -9 does it."""
    os.kill(os.getpid(), signal.SIGKILL)


def dying(owner: Any, name: str, call: int, after: bool) -> Callable[[], None]:
    """Patch ``owner.name`` so that its ``call``-th call kills the process, before or after it does its work."""

    def patch() -> None:
        original, calls = getattr(owner, name), []

        def stand_in(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            if len(calls) == call and not after:
                die()
            result = original(*args, **kwargs)
            if len(calls) == call and after:
                die()
            return result

        setattr(owner, name, stand_in)

    return patch


MOMENTS: dict[str, Callable[[], None]] = {
    "before-the-first": dying(RollbackJournal, "add", 1, after=False),
    "right-after-the-first": dying(RollbackJournal, "add", 1, after=True),
    "while-dropping": dying(checkpoint, "drop", 1, after=False),
    "first-row-after": dying(History, "append", 12, after=True),
    "right-after-the-second": dying(RollbackJournal, "add", 2, after=True),
    "checkpoint-after-the-second": dying(RunCheckpoints, "save", 5, after=True),
}


def forked(work: Path, patch: Callable[[], None] | None) -> int:
    """The signal or exit code that a process ended with which ran in ``work``."""
    child = os.fork()
    if child == 0:
        if patch is not None:
            patch()
        run(work)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    torch.set_num_threads(1)
    root = Path(sys.argv[1])
    assert forked(root / "straight", None) == 0
    for moment, patch in MOMENTS.items():
        assert forked(root / moment, patch) == -signal.SIGKILL, f"{moment} did not kill"
        assert forked(root / moment, None) == 0, f"{moment} did not finish"
