"""The journal of a run's rollbacks.

It is one JSON file that is replaced whole. Writing it is the rollback: everything else (dropping the abandoned
checkpoints, restoring the state, applying the adjustments) follows from it each time the run is restored, so a process
killed at any moment finds a rollback either done or not begun.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhf_core.runtime import distributed
from rlhf_core.storage.files import atomic_write_json, read_json


@dataclass(frozen=True)
class Rollback:
    """One return to an earlier checkpoint.

    Attributes:
        from_iteration: The iteration after which the run went back.
        to_iteration: The checkpoint that it went back to.
        finding: The health finding that asked for it, as JSON.
        rows: The history of the abandoned iterations ``to_iteration + 1`` onwards.
        samples: Their sample replies.
    """

    from_iteration: int
    to_iteration: int
    finding: dict[str, Any]
    rows: list[dict[str, Any]]
    samples: list[dict[str, Any]]

    @property
    def adjust(self) -> dict[str, float]:
        """By which factor each setting was multiplied."""
        factors: dict[str, float] = self.finding["adjust"]
        return factors

    def record(self) -> dict[str, Any]:
        """Summarise the rollback for metrics and history."""
        return {"rule": self.finding["rule"], "from": self.from_iteration, "to": self.to_iteration, **self.adjust}


class RollbackJournal:
    """The rollbacks of one run, oldest first. The first rank has the file; all ranks know what it says."""

    def __init__(self, path: Path) -> None:
        self.path = path
        saved = read_json(path) if distributed.is_rank_zero() and path.exists() else []
        self.entries = [Rollback(**entry) for entry in distributed.broadcast_from_rank0(saved)]

    def __len__(self) -> int:
        return len(self.entries)

    def add(self, entry: Rollback) -> None:
        """Decide a rollback: once this returns it has happened, whatever becomes of the process."""
        entries = [*self.entries, entry]
        atomic_write_json(self.path, [asdict(each) for each in entries])
        self.entries = entries

    def factor(self, name: str, first: int = 0) -> float:
        """Product of the factors on setting ``name`` of all rollbacks from number ``first`` (from 0) on."""
        product = 1.0
        for entry in self.entries[first:]:
            product *= entry.adjust.get(name, 1.0)
        return product

    def clear(self) -> None:
        """Forget all rollbacks, because the run begins anew."""
        self.path.unlink(missing_ok=True)
        self.entries = []

    def abandoned(self, kind: str) -> list[dict[str, Any]]:
        """Return all abandoned ``rows`` or ``samples``, each with the number (from 1) of its ``rollback``."""
        return [
            {"rollback": number} | row
            for number, entry in enumerate(self.entries, start=1)
            for row in getattr(entry, kind)
        ]
