"""The records of a run: what a stage sends its tracker, as things to tell the server."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from rlhf_core.tracking.journal import Journal, JournalRecord


class RunRecords(ABC):
    """A tracker that turns every call into a record for the run of a journal. Subclasses take the records."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    @property
    def run_id(self) -> str:
        return self.journal.header.run_id or ""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(float(value))}
        if finite:
            self.take(_record("metrics", finite, step or 0))

    def log_params(self, params: Mapping[str, Any]) -> None:
        self.take(_record("params", {name: str(value) for name, value in params.items()}))

    def log_artifact(self, path: Path, folder: str | None = None) -> None:
        self.take(_record("artifact", {str(path): folder}))

    def set_tags(self, tags: Mapping[str, str]) -> None:
        self.take(_record("tags", tags))

    def end(self, status: Literal["FINISHED", "FAILED", "KILLED"]) -> None:
        """End the run; nothing is recorded after that."""
        self.take(_record("end", {"status": status}))

    @abstractmethod
    def take(self, record: JournalRecord) -> None:
        """Send or keep a record."""


class JournalTracker(RunRecords):
    """Leaves all records in the journal, for the process that delivers those of the workspace."""

    def take(self, record: JournalRecord) -> None:
        self.journal.append(record)

    def end(self, status: Literal["FINISHED", "FAILED", "KILLED"]) -> None:
        super().end(status)
        self.journal.release()


def _record(
    kind: Literal["metrics", "params", "tags", "artifact", "end"], values: Mapping[str, Any], step: int = 0
) -> JournalRecord:
    return JournalRecord(kind, values, int(time.time() * 1000), step)
