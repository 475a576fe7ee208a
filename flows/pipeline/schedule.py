"""Which stages may start now, given the graph and the outcomes so far."""

from __future__ import annotations

from collections.abc import Mapping

from flows.dvc_repo.graph import StageNode
from flows.stage.outcome import StageOutcome
from rlhf_core.errors import EXIT_GATE_FAILED, EXIT_PREEMPTED, EXIT_TRAINING_PAUSED, EXIT_USER_ERROR

STATE_NAMES = {
    EXIT_GATE_FAILED: "GateFailed",
    EXIT_TRAINING_PAUSED: "TrainingPaused",
    EXIT_USER_ERROR: "UserError",
    EXIT_PREEMPTED: "Preempted",
}


def final_name(exit_code: int) -> str:
    """Return the state name of a run whose stage ended with ``exit_code``."""
    return STATE_NAMES.get(exit_code, "StageFailed")


class Schedule:
    """Selects stages whose predecessors are done, at most ``parallel`` at a time.

    After a failure no further stage is started; those that are running finish, since their results may be wanted in
    the next run.
    """

    def __init__(self, graph: Mapping[str, StageNode], parallel: int) -> None:
        self.graph = graph
        self.parallel = parallel
        self.waiting = list(graph)
        self.running: set[str] = set()
        self.outcomes: dict[str, StageOutcome] = {}

    @property
    def finished(self) -> bool:
        """Whether no stage is running or waiting."""
        return not self.waiting and not self.running

    def start_ready(self, stopping: bool) -> list[str]:
        """Return the stages to start now and count them as running; skip all others after a failure or a stop."""
        if stopping or any(not outcome.ok for outcome in self.outcomes.values()):
            for name in self.waiting:
                self.outcomes[name] = StageOutcome.skipped(name)
            self.waiting = []
            return []
        done = {name for name, outcome in self.outcomes.items() if outcome.ok}
        ready = [name for name in self.waiting if done.issuperset(self.graph[name].after)]
        started = ready[: max(0, self.parallel - len(self.running))]
        self.waiting = [name for name in self.waiting if name not in started]
        self.running.update(started)
        return started

    def record(self, outcome: StageOutcome) -> None:
        """Record the outcome of a running stage."""
        self.running.discard(outcome.stage)
        self.outcomes[outcome.stage] = outcome
