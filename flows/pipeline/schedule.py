"""Which stages may start now: a pure bookkeeping of the graph, with no engine in it."""

from __future__ import annotations

from collections.abc import Mapping

from flows.dvc_repo.graph import StageNode
from flows.stage.outcome import StageOutcome
from rlhf_core.errors import EXIT_GATE_FAILED, EXIT_PREEMPTED, EXIT_TRAINING_PAUSED, EXIT_USER_ERROR

NAMES = {
    EXIT_GATE_FAILED: "GateFailed",
    EXIT_TRAINING_PAUSED: "TrainingPaused",
    EXIT_USER_ERROR: "UserError",
    EXIT_PREEMPTED: "Preempted",
}


def final_name(exit_code: int) -> str:
    """The state name of a run whose stage ended with ``exit_code``."""
    return NAMES.get(exit_code, "StageFailed")


class Schedule:
    """Hands out stages whose predecessors are done; what stands behind a failure is skipped, other branches go on.

    After a failure nothing new is started except stages already under way: their result may be wanted next time.
    """

    def __init__(self, graph: Mapping[str, StageNode], parallel: int) -> None:
        self.graph = graph
        self.parallel = parallel
        self.waiting = list(graph)
        self.running: set[str] = set()
        self.outcomes: dict[str, StageOutcome] = {}

    @property
    def finished(self) -> bool:
        """Nothing runs and nothing waits."""
        return not self.waiting and not self.running

    def take(self, stopping: bool) -> list[str]:
        """The stages to start now."""
        if stopping or any(not outcome.ok for outcome in self.outcomes.values()):
            for name in self.waiting:
                self.outcomes[name] = StageOutcome(name, "skipped", 0, "", 0.0, 0.0, 0.0)
            self.waiting = []
            return []
        ready = [n for n in self.waiting if all(self._is_done(before) for before in self.graph[n].after)]
        chosen = ready[: max(0, self.parallel - len(self.running))]
        self.waiting = [name for name in self.waiting if name not in chosen]
        self.running.update(chosen)
        return chosen

    def done(self, outcome: StageOutcome) -> None:
        """Note how a running stage ended."""
        self.running.discard(outcome.stage)
        self.outcomes[outcome.stage] = outcome

    def _is_done(self, name: str) -> bool:
        return name in self.outcomes and self.outcomes[name].ok
