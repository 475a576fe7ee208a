"""The last run of a workspace, as its events record it: when, how long, how it ended, its verdict."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from flows.pipeline.events import EventReader, RunEnded, StageEnded, VerdictReached, events_file
from flows.pipeline.verdict import RunVerdict

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
        recorded = EventReader(events_file(workspace)).read_new_recorded()
    except (LookupError, TypeError, ValueError):
        return None
    if not recorded:
        return None
    events = [entry.event for entry in recorded]
    return LastRun(
        started=datetime.fromtimestamp(recorded[0].time),
        last_event=datetime.fromtimestamp(recorded[-1].time),
        state=next((event.state for event in events if isinstance(event, RunEnded)), ""),
        ran=sum(isinstance(event, StageEnded) and event.outcome.action == "ran" for event in events),
        verdict=next((event.verdict for event in events if isinstance(event, VerdictReached)), None),
    )
