"""Events of a pipeline run, from its process to the command that shows them: JSON lines in ``.rlhf/events.jsonl``."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, get_args

from flows.pipeline.verdict import RunVerdict
from flows.stage import StageOutcome
from flows.workspace import PRIVATE, private_path

EVENTS_VARIABLE = "RLHF_EVENTS"
EVENTS_FILE = "events.jsonl"
_lock = threading.Lock()


@dataclass(frozen=True)
class RunPlanned:
    """The run will bring these stages up to date."""

    stages: Sequence[str]


@dataclass(frozen=True)
class StageStarted:
    """A stage was started beside the flow, or submitted to ``pool``.

    Its output is what its log holds from byte ``log_start`` on. ``started`` is in seconds since the epoch.
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
class StageRetried:
    """A stage crashed and is tried again after ``delay_seconds``."""

    stage: str
    message: str
    delay_seconds: float


@dataclass(frozen=True)
class StagePreempted:
    """A stage was preempted and is run again."""

    stage: str
    message: str


@dataclass(frozen=True)
class PhaseStarted:
    """The run entered a phase after its stages; its progress, if any, goes to the log file of the name ``log``."""

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


PipelineEvent = (
    RunPlanned
    | StageStarted
    | StageEnded
    | StageRetried
    | StagePreempted
    | PhaseStarted
    | RegistryUpdated
    | VerdictReached
    | RunEnded
)
KINDS: dict[str, type[PipelineEvent]] = {event_type.__name__: event_type for event_type in get_args(PipelineEvent)}


def _decode(line: bytes) -> tuple[float, PipelineEvent]:
    fields: dict[str, Any] = json.loads(line)
    event_type, written = KINDS[fields.pop("kind")], float(fields.pop("time"))
    if event_type is StageEnded:
        return written, StageEnded(StageOutcome(**fields["outcome"]))
    if event_type is VerdictReached:
        return written, VerdictReached(RunVerdict.from_dict(fields["verdict"]))
    return written, event_type(**fields)


class EventWriter:
    """Appends events to a file; does nothing without one."""

    def __init__(self, path: str | None) -> None:
        self.path = Path(path) if path else None

    def emit(self, event: PipelineEvent) -> None:
        """Append ``event`` with the current time."""
        if self.path is None:
            return
        line = json.dumps({"kind": type(event).__name__, "time": time.time(), **asdict(event)})
        with _lock, self.path.open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")


class EventReader:
    """Reads the events that were appended since the last call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0

    def read_new(self) -> list[PipelineEvent]:
        """Return the complete events that have not been returned yet."""
        return [event for _, event in self.read_new_timed()]

    def read_new_timed(self) -> list[tuple[float, PipelineEvent]]:
        """Return the same, each with when it was written in seconds since the epoch."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as stream:
            stream.seek(self.offset)
            data = stream.read()
        complete = data[: data.rfind(b"\n") + 1]
        self.offset += len(complete)
        return [_decode(line) for line in complete.splitlines()]


def events_file(workspace: Path) -> Path:
    """Return the path of the events of the workspace's last run, which may not exist."""
    return workspace / PRIVATE / EVENTS_FILE


def new_events_file(workspace: Path) -> Path:
    """Create an empty events file for one run and return its path."""
    path = private_path(workspace, EVENTS_FILE)
    path.write_text("", encoding="utf-8")
    return path


COMPLETED = "Completed"


@dataclass(frozen=True)
class LastRun:
    """A run that is over.

    Attributes:
        started: When the pipeline process began.
        last_event: When it reported last, which is its end unless it was killed.
        state: Its final state; empty if its process was gone before it could report one.
        ran: How many stages it computed.
        verdict: None if the run did not get as far as to reach one.
    """

    started: datetime
    last_event: datetime
    state: str
    ran: int
    verdict: RunVerdict | None

    @property
    def completed(self) -> bool:
        """Whether the run brought everything up to date."""
        return self.state == COMPLETED

    @property
    def duration(self) -> timedelta:
        """From the start to the last event."""
        return self.last_event - self.started


def read_last_run(workspace: Path) -> LastRun | None:
    """Read the last run of ``workspace``; None if there was none, or it was recorded by another version.

    The events are those of the current run while one is under way.
    """
    try:
        recorded = EventReader(events_file(workspace)).read_new_timed()
    except (LookupError, TypeError, ValueError):
        return None
    if not recorded:
        return None
    events = [event for _, event in recorded]
    return LastRun(
        started=datetime.fromtimestamp(recorded[0][0]),
        last_event=datetime.fromtimestamp(recorded[-1][0]),
        state=next((event.state for event in events if isinstance(event, RunEnded)), ""),
        ran=sum(isinstance(event, StageEnded) and event.outcome.action == "ran" for event in events),
        verdict=next((event.verdict for event in events if isinstance(event, VerdictReached)), None),
    )
