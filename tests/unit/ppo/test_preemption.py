"""A PPO run that loses its place after every single iteration ends like one that was left alone, rollbacks included."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from unit.ppo.rollback_runs import ITERATIONS, trainer_in
from unit.ppo.test_trainer import best, equal, history, weights
from unit.ppo.tiny import make_tiny

from rlhf_core.errors import Preempted
from rlhf_core.ppo.experience import IterationRecord
from rlhf_core.ppo.trainer import Trainer
from rlhf_core.runtime.preemption import PreemptionSignal
from rlhf_core.training.run_context import RunContext


@pytest.mark.slow
def test_a_run_that_is_preempted_after_every_iteration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    straight = make_tiny()
    trainer_in(tmp_path / "straight", straight).run()

    original, starts = Trainer.iterate, list[int]()

    def iterate_and_be_told_to_stop(trainer: Trainer) -> IterationRecord:
        starts.append(trainer.done)
        os.kill(os.getpid(), signal.SIGTERM)
        return original(trainer)

    monkeypatch.setattr(Trainer, "iterate", iterate_and_be_told_to_stop)
    while True:
        pieces = make_tiny()
        preemption = PreemptionSignal()
        context = RunContext(tmp_path / "pieces", preemption=preemption)
        trainer = trainer_in(tmp_path / "pieces", pieces, context=context)
        with pytest.raises(Preempted, match=r"iteration \d of 6 and was stopped there"), preemption.handled("ppo"):
            trainer.run()
        if trainer.done == ITERATIONS:
            break
    # Back to the start after iteration 3, and to 2 after iteration 5.
    assert starts == [0, 1, 2, 0, 1, 2, 3, 4, 2, 3, 4, 5]

    assert equal(weights(pieces), weights(straight))
    for file in ("samples.jsonl", "rollbacks.json"):
        one, other = (_without_clock(tmp_path / run / file) for run in ("straight", "pieces"))
        assert one == other
    assert history(tmp_path / "pieces") == history(tmp_path / "straight")
    assert best(tmp_path / "pieces").items() >= best(tmp_path / "straight").items()
    kept = [sorted(path.name for path in (tmp_path / run / "checkpoints").iterdir()) for run in ("straight", "pieces")]
    assert kept[0] == kept[1]


def _without_clock(path: Path) -> list[str]:
    return re.sub(r'"seconds_\w+": [\d.e-]+', "", path.read_text()).splitlines()
