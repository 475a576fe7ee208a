"""Rolling a run back to a healthy checkpoint: which one, and a journal of what was done.

The journal is one JSON file that is replaced whole. Writing it is the rollback: everything else (dropping the abandoned
checkpoints, restoring the state, applying the adjustments) follows from it each time the run is restored, so a process
killed at any moment finds a rollback either done or not begun.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhf_core import distributed
from rlhf_core.config.health.health import HealthConfig
from rlhf_core.files import atomic_write_json, read_json
from rlhf_core.ppo.health_monitor import Finding, Monitor
from rlhf_core.ppo.run_checkpoint import RunFiles


@dataclass(frozen=True)
class Rollback:
    """One return. ``rows`` and ``samples`` are those of the abandoned iterations ``to_iteration + 1`` onwards."""

    from_iteration: int
    to_iteration: int
    finding: dict[str, Any]
    rows: list[dict[str, Any]]
    samples: list[dict[str, Any]]

    @property
    def adjust(self) -> dict[str, float]:
        """Factor by setting."""
        factors: dict[str, float] = self.finding["adjust"]
        return factors

    def record(self) -> dict[str, Any]:
        """What the metrics and the history say of it."""
        return {"rule": self.finding["rule"], "from": self.from_iteration, "to": self.to_iteration, **self.adjust}


class Journal:
    """The rollbacks of one run, oldest first. Of several ranks the first has the file, and all know what it says."""

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
        """Forget everything: the run begins anew."""
        self.path.unlink(missing_ok=True)
        self.entries = []

    def abandoned(self, kind: str) -> list[dict[str, Any]]:
        """All abandoned ``rows`` or ``samples``, each with the number (from 1) of the ``rollback`` that took it."""
        return [
            {"rollback": number} | row
            for number, entry in enumerate(self.entries, start=1)
            for row in getattr(entry, kind)
        ]


@dataclass(frozen=True)
class Rollbacks:
    """Decides about rollbacks of one run and keeps what they need."""

    health: HealthConfig
    monitor: Monitor
    files: RunFiles
    journal: Journal

    @property
    def armed(self) -> bool:
        """Whether a rule may still send the run back, so that checkpoints must be kept for it."""
        wanted = self.health.mode == "enforce" and any(rule.action == "rollback" for rule in self.monitor.rules)
        return wanted and len(self.journal) < self.health.max_rollbacks

    def target(self, findings: Sequence[Finding]) -> tuple[int | None, str]:
        """The iteration to go back to; None, and why, when the run must pause instead."""
        if not self.armed:
            return None, f" {len(self.journal)} rollbacks were made, as many as ppo.health.max_rollbacks allows."
        steps = self.files.metas()
        found = healthy(steps, min(finding.since for finding in findings))
        if found is None and self.journal.entries and self.journal.entries[-1].to_iteration in steps:
            found = self.journal.entries[-1].to_iteration
        return found, "" if found is not None else " No checkpoint from before it is left to go back to."

    def keep_from(self, done: int) -> int | None:
        """The oldest checkpoint that a coming rollback may need after ``done`` iterations; None when there is none."""
        first = self.monitor.earliest_window() if self.armed else None
        return None if first is None else healthy([*self.files.metas(), done], first) or 0

    def needed_best(self) -> set[int]:
        """Iterations that were the best so far at a checkpoint which a rollback may go to."""
        return {meta["best"] for meta in self.files.metas().values()} if self.armed else set()

    def drop_abandoned(self) -> None:
        """Remove the checkpoints that the last rollback left behind."""
        if not self.journal.entries:
            return
        target = self.journal.entries[-1].to_iteration
        for iteration, meta in self.files.metas(extra=True).items():
            if iteration > target and meta["rollbacks"] < len(self.journal):
                self.files.drop(iteration)


def healthy(steps: Iterable[int], first: int) -> int | None:
    """The newest of the checkpoints ``steps`` that was healthy when a rule's window began at iteration ``first``.

    The signals of iteration k describe the policy that checkpoint k - 1 holds, so a healthy one is older than that. The
    start of the run is healthy by definition. None when no such checkpoint is left.
    """
    return max((step for step in steps if step == 0 or step + 1 < first), default=None)
