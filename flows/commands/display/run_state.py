"""The state of a run, as its events and the logs of its stages tell it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from flows.commands.display.stage_progress import StageProgress
from flows.commands.display.stage_results import describe_result
from flows.pipeline.events import (
    EventReader,
    PhaseStarted,
    PipelineEvent,
    RunEnded,
    RunPlanned,
    StageEnded,
    StagePreempted,
    StageRetried,
    StageStarted,
    events_file,
)
from flows.pipeline.verdict import describe_failure
from flows.stage.outcome import StageOutcome
from flows.workspace.folder import PRIVATE


@dataclass
class StageState:
    """One stage of a run: waiting, running (then it has ``progress``), or ended (then it has an ``outcome``).

    ``note`` says where or why it waits, ``result`` what it has produced or why it failed.
    """

    name: str
    progress: StageProgress | None = None
    started: float = 0.0
    outcome: StageOutcome | None = None
    note: str = ""
    result: str = ""


class RunState:
    """The stages of a run and the phase that it is in."""

    def __init__(self, workspace: Path, phase: str = "") -> None:
        self.workspace = workspace
        self.phase = phase
        self.phase_progress: StageProgress | None = None
        self.stages: dict[str, StageState] = {}
        self.ended = False

    def apply(self, event: PipelineEvent) -> None:
        """Update the state with the next event."""
        match event:
            case RunPlanned(stages):
                self.stages = {name: StageState(name) for name in stages}
                self.enter_phase("")
            case StageStarted(name, pool, started, log_start):
                progress = StageProgress(self._log(name), log_start)
                note = f"submitted to {pool}" if pool else ""
                self.stages[name] = StageState(name, progress, started, note=note)
            case StageEnded(outcome):
                self._end_stage(outcome)
            case StageRetried(name, message, delay_seconds):
                first_line = message.strip().partition("\n")[0]
                self._restart(name, f"{first_line}; trying again in {delay_seconds:g} s")
            case StagePreempted(name, message):
                self._restart(name, message)
            case PhaseStarted(phase, log):
                self.enter_phase(phase)
                self.phase_progress = StageProgress(self._log(log), 0) if log else None
            case RunEnded():
                self.ended = True
                self.enter_phase("")
            case _:
                pass

    def enter_phase(self, phase: str) -> None:
        """Set what the run is doing besides its stages; empty for nothing."""
        self.phase, self.phase_progress = phase, None

    def refresh(self) -> None:
        """Read the logs of the running stages."""
        for stage in self.running:
            assert stage.progress is not None
            stage.progress.refresh()
        if self.phase_progress is not None:
            self.phase_progress.refresh()

    @property
    def running(self) -> list[StageState]:
        """The stages that have started and not ended."""
        return [stage for stage in self.stages.values() if stage.progress is not None and stage.outcome is None]

    @property
    def done(self) -> int:
        """How many stages are up to date."""
        return sum(stage.outcome is not None and stage.outcome.ok for stage in self.stages.values())

    def _restart(self, name: str, note: str) -> None:
        stage = self._stage(name)
        stage.note = note
        if stage.progress is not None:
            stage.progress.restart()

    def _end_stage(self, outcome: StageOutcome) -> None:
        stage = self._stage(outcome.stage)
        stage.outcome = outcome
        if outcome.ok:
            stage.result = describe_result(self.workspace, outcome.stage)
        elif outcome.action == "failed":
            stage.result = describe_failure(self.workspace, outcome).removeprefix(f"{outcome.stage} failed: ")

    def _stage(self, name: str) -> StageState:
        return self.stages.setdefault(name, StageState(name))

    def _log(self, name: str) -> Path:
        return self.workspace / PRIVATE / "logs" / f"{name}.log"


def read_run_state(workspace: Path, since: datetime) -> RunState | None:
    """Return the state of the run that holds the workspace ``since`` then, None if it has not written events.

    Nothing is changed: this is for a process that looks on.
    """
    path = events_file(workspace)
    if not path.is_file() or path.stat().st_mtime < since.timestamp():
        return None
    state = RunState(workspace)
    for event in EventReader(path).read_new():
        state.apply(event)
    state.refresh()
    return state
