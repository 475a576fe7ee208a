"""Which stage starts when several could: as many at a time as allowed, in the order of dvc.yaml."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from flows.dvc_repo.graph import StageNode
from flows.pipeline.flow import PipelineContext, StageSlots
from flows.stage import StageOutcome

# The recipe from the reward models on: nothing before `evaluate` waits for the judge.
AFTER = {
    "reward": (),
    "referee": (),
    "judge": (),
    "gate-reward": ("reward", "referee"),
    "ppo": ("gate-reward",),
    "evaluate": ("ppo", "judge"),
}


class Run:
    """Stages in threads, each of which asks for a slot when told, and ends when told."""

    def __init__(self, parallel: int) -> None:
        graph = {name: StageNode(name, after, "", ()) for name, after in AFTER.items()}
        self.slots = StageSlots(parallel, graph)
        context: Any = SimpleNamespace(outcomes={}, starts_no_more=False)
        context.have_succeeded = lambda stages: PipelineContext.have_succeeded(context, stages)
        self.context = context
        self.begun = {name: threading.Event() for name in AFTER}
        self.may_end = {name: threading.Event() for name in AFTER}
        self.threads: dict[str, threading.Thread] = {}

    def ask(self, *names: str) -> None:
        for name in names:
            thread = threading.Thread(target=self._hold, args=(name,), daemon=True)
            self.threads[name] = thread
            thread.start()

    def _hold(self, name: str) -> None:
        with self.slots.taken(self.context, name):
            self.begun[name].set()
            self.may_end[name].wait()

    def end(self, name: str, action: Any = "ran") -> None:
        self.may_end[name].set()
        self.threads[name].join()
        self.context.outcomes[name] = StageOutcome(name, action)

    def starts(self, name: str) -> bool:
        return self.begun[name].wait(20)

    def waits(self, name: str) -> bool:
        return not self.begun[name].wait(1.2)  # longer than a slot takes to look again


def test_the_judge_leaves_its_slot_to_what_ppo_waits_for() -> None:
    run = Run(parallel=2)
    run.ask("judge")
    assert run.waits("judge"), "reward and referee could start, and come first"
    run.ask("reward", "referee")
    assert run.starts("reward") and run.starts("referee")
    assert run.waits("judge")
    run.end("reward")
    assert run.starts("judge"), "the gate still waits for the referee"
    run.end("referee")
    run.ask("gate-reward")
    assert run.starts("gate-reward")
    run.end("gate-reward")
    run.ask("ppo")
    assert run.starts("ppo"), "beside the judge"


@pytest.mark.parametrize("parallel", [1, 2, 3])
def test_no_more_stages_run_than_there_are_slots(parallel: int) -> None:
    run = Run(parallel)
    run.ask("judge", "referee", "reward")
    first = ["reward", "referee", "judge"][:parallel]
    assert all(map(run.starts, first))
    assert all(run.waits(name) for name in ["reward", "referee", "judge"][parallel:])


def test_a_stage_is_not_kept_waiting_by_one_that_will_not_come() -> None:
    run = Run(parallel=1)
    run.ask("judge")
    assert run.waits("judge")
    run.context.starts_no_more = True  # another stage failed: every task ends at its slot
    assert run.starts("judge")
    # What stands behind a failed stage never asks, and is not waited for.
    failed = Run(parallel=1)
    failed.ask("reward")
    assert failed.starts("reward")
    failed.end("reward", "failed")
    failed.ask("referee")
    assert failed.starts("referee")
    failed.end("referee")
    failed.ask("judge")
    assert failed.starts("judge"), "gate-reward is not ready"
