"""Events of a pipeline run for the command that shows it: lines of ``.rlhf/events.jsonl``."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from pydantic import TypeAdapter

from flows.pipeline.verdict import RunVerdict
from flows.stage import StageOutcome
from flows.supervision.processes import LogReader
from flows.workspace import PRIVATE, private_path
from rlhf_core.errors import EXIT_GATE_FAILED, EXIT_PREEMPTED, EXIT_TRAINING_PAUSED, EXIT_USER_ERROR

if TYPE_CHECKING:
    from prefect.states import State

EVENTS_FILE = "events.jsonl"
COMPLETED = "Completed"  # the final state of a run that brought everything up to date
# The final state of a run that failed, by the exit code of the stage that ended it.
FAILED_STATES = {
    EXIT_GATE_FAILED: "GateFailed",
    EXIT_TRAINING_PAUSED: "TrainingPaused",
    EXIT_USER_ERROR: "UserError",
    EXIT_PREEMPTED: "Preempted",
}
_lock = threading.Lock()


def failed_state(exit_code: int, message: str) -> State[Any]:
    """The final state of a run that failed, under a name that says why.

    A flow returns it instead of raising: Prefect would log the traceback twice around the message.
    """
    from prefect.states import Failed  # commands that show a run do without Prefect

    return Failed(name=FAILED_STATES.get(exit_code, "StageFailed"), message=message)


@dataclass(frozen=True)
class RunPlanned:
    """The run will bring these stages up to date."""

    stages: Sequence[str]


@dataclass(frozen=True)
class StageStarted:
    """A stage was started beside the flow, or submitted to ``pool``.

    Its output is what its log holds from byte ``log_start`` on. ``started`` is in seconds since the
    epoch.
    """

    stage: str
    pool: str | None = None
    started: float = 0.0
    log_start: int = 0


@dataclass(frozen=True)
class StageEnded:
    """A stage has its final outcome."""

    outcome: StageOutcome


@dataclass(frozen=True)
class StageRepeated:
    """A stage is run again, or its job waits for a worker; ``message`` says why in one line."""

    stage: str
    message: str
    log_start: int = 0


@dataclass(frozen=True)
class PhaseStarted:
    """The run entered a phase after its stages, whose progress goes to the log file ``log``."""

    phase: str
    log: str | None = None


@dataclass(frozen=True)
class RegistryUpdated:
    """Models were registered, refused or promoted; ``message`` says which."""

    message: str


@dataclass(frozen=True)
class VerdictReached:
    """The verdict of a run of a pipeline with a gated policy."""

    verdict: RunVerdict


@dataclass(frozen=True)
class RunEnded:
    """The run has ended in the named state."""

    state: str
    message: str


@dataclass(frozen=True)
class RunTimed:
    """The command that showed the run ends, after ``seconds`` with its own start and end."""

    seconds: float


PipelineEvent = (
    RunPlanned
    | StageStarted
    | StageEnded
    | StageRepeated
    | PhaseStarted
    | RegistryUpdated
    | VerdictReached
    | RunEnded
    | RunTimed
)
KINDS = {kind.__name__: TypeAdapter[PipelineEvent](kind) for kind in get_args(PipelineEvent)}


class EventLog:
    """A file of events. One process appends them, another reads what is new.

    ``first`` and ``last`` are when the first and the last event that was read was written, in
    seconds since the epoch.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.reader = path, LogReader(path, 0)
        self.first = self.last = 0.0

    def emit(self, event: PipelineEvent) -> None:
        """Append ``event`` with the current time."""
        line = json.dumps({"kind": type(event).__name__, "time": time.time(), **asdict(event)})
        with _lock, self.path.open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")

    def read_new(self) -> list[PipelineEvent]:
        """Return the complete events that have not been returned yet."""
        complete = self.reader.lines()
        self.reader.start += len(complete)
        events = []
        for line in complete.splitlines():
            fields = json.loads(line)
            self.last = float(fields["time"])
            self.first = self.first or self.last
            events.append(KINDS[fields["kind"]].validate_python(fields))
        return events


def events_file(workspace: Path) -> Path:
    """Return the path of the events of the workspace's last run, which may not exist."""
    return workspace / PRIVATE / EVENTS_FILE


def new_events_file(workspace: Path) -> Path:
    """Create an empty events file for one run and return its path."""
    path = private_path(workspace, EVENTS_FILE)
    path.write_text("", encoding="utf-8")
    return path
