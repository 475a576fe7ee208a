"""PPO runs that roll back twice, and moments at which a process that makes one may be killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unit.ppo.tiny import Tiny, make_config, make_tiny, make_trainer

from rlhf_core.config.health import Check, Rule
from rlhf_core.config.ppo import PpoConfig
from rlhf_core.ppo.checkpoints import RollbackJournal
from rlhf_core.ppo.trainer import Trainer
from rlhf_core.training.checkpoints import checkpoint
from rlhf_core.training.checkpoints.manager import RunCheckpoints
from rlhf_core.training.history import History
from rlhf_core.training.rng import seed_everything

ITERATIONS = 6


def rule(*checks: Check, action: Any = "rollback", after: int = 1, name: str = "told") -> Rule:
    """A rule that doubles the KL coefficient and halves the rates."""
    adjust = (("kl_coefficient", 2.0), ("lr", 0.5))
    return Rule(name, checks, "critical", action, "it was told to", "a test", "none", after, adjust)


def config_with(iterations: int, keep: int = 2) -> PpoConfig:
    """Checkpoints and selections every two iterations."""
    return make_config(
        iterations=iterations, health={"mode": "enforce"}, checkpoint={"every": 2, "keep": keep}
    )


def trainer_in(work: Path, tiny: Tiny, **parts: Any) -> Trainer:
    """A run that goes back at 3 (to the start) while the coefficient is below 0.07, and at 5 (to 2)
    while it is below 0.15, with checkpoints every two iterations."""
    seed_everything(1)
    rules = [
        rule(Check("kl_coefficient", "<", 0.07, window=1), after=3),
        rule(Check("kl_coefficient", "<", 0.15, window=1), after=5, name="later"),
    ]
    return make_trainer(tiny, config_with(ITERATIONS, keep=1), work, rules=rules, **parts)


def dying(owner: Any, name: str, call: int, after: bool) -> Callable[[], None]:
    """Patch ``owner.name`` so that its ``call``-th call kills the process, before or after it does
    its work.
    """

    def patch() -> None:
        original, calls = getattr(owner, name), []

        def stand_in(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            if len(calls) == call and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = original(*args, **kwargs)
            if len(calls) == call and after:
                os.kill(os.getpid(), signal.SIGKILL)
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


def run_and_die(work: Path, moment: str) -> None:
    MOMENTS[moment]()
    trainer_in(work, make_tiny()).run()
