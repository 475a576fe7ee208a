"""The partial state of a PPO run on disk.

It holds checkpoints that health rules may go back to, and the best weights so far.

The journal of rollbacks is one JSON file that is replaced whole. Writing it is the rollback:
everything else (dropping the abandoned checkpoints, restoring the state, applying the adjustments)
follows from it each time the run is restored, so a process killed at any moment finds a rollback
either done or not begun.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from rlhf_core.runtime import distributed
from rlhf_core.storage.files import (
    atomic_dir,
    atomic_write_json,
    fsync_path,
    read_json,
    remove_tree,
)
from rlhf_core.training.checkpoints import checkpoint
from rlhf_core.training.checkpoints.manager import RunCheckpoints, not_of_one_run

JOURNAL = "rollbacks.json"


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
        return {
            "rule": self.finding["rule"],
            "from": self.from_iteration,
            "to": self.to_iteration,
            **self.adjust,
        }


class RollbackJournal:
    """The rollbacks of one run, oldest first.

    The first rank has the file; all ranks know what it says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        saved = []
        if distributed.is_rank_zero() and path.exists():
            saved = read_json(path)
        self.entries = [Rollback(**entry) for entry in distributed.broadcast_from_rank0(saved)]

    def __len__(self) -> int:
        return len(self.entries)

    def add(self, entry: Rollback) -> None:
        """Decide a rollback: once this returns it has happened, whatever becomes of the process."""
        entries = [*self.entries, entry]
        atomic_write_json(self.path, [asdict(each) for each in entries])
        self.entries = entries

    def factor(self, name: str, first: int = 0) -> float:
        """The product of all factors on setting ``name``.

        Those of rollbacks before number ``first`` (from 0) are left out.
        """
        product = 1.0
        for entry in self.entries[first:]:
            product *= entry.adjust.get(name, 1.0)
        return product

    def clear(self) -> None:
        """Forget all rollbacks, because the run begins anew."""
        self.path.unlink(missing_ok=True)
        self.entries = []


def abandoned_rows(work: Path, kind: Literal["rows", "samples"]) -> list[dict[str, Any]]:
    """Return all rows or samples that rollbacks abandoned.

    They are those of the run in ``work``, each with its ``rollback``.

    They are numbered from 1.
    """
    path = work / JOURNAL
    entries = []
    if path.is_file():
        entries = read_json(path)
    abandoned: list[dict[str, Any]] = []
    for number, entry in enumerate(entries, start=1):
        abandoned += [{"rollback": number} | row for row in entry[kind]]
    return abandoned


@dataclass(kw_only=True)
class RollbackCheckpoints(RunCheckpoints):
    """Checkpoints of a run that may go back to one of them.

    Its ``journal`` is the truth about that.
    """

    journal: RollbackJournal

    def save(self, step: int, meta: Mapping[str, Any], extra: bool = False) -> None:
        """See ``RunCheckpoints.save``.

        The checkpoint also says how many rollbacks came before it.
        """
        super().save(step, {**meta, "rollbacks": len(self.journal)}, extra)

    def roll_back(self, entry: Rollback) -> None:
        """Decide a rollback, once the checkpoint that it may go back to is on the disk."""
        self.manager.finish()
        self.journal.add(entry)

    def load(self) -> tuple[int, dict[str, Any]] | None:
        """Restore the newest sound checkpoint that no rollback has abandoned.

        See ``RunCheckpoints.load``.
        """
        self.manager.finish()
        self._drop_abandoned()
        newest = super().load()
        if newest is None:
            self.journal.clear()
            return None
        seen = int(newest[1]["rollbacks"])
        if seen > len(self.journal):
            what = f"{self.journal.path} holds {len(self.journal)} of {seen} rollbacks"
            raise not_of_one_run(self.manager.directory.parent, newest[0], what)
        for engine in self.engines.values():
            # Rates are those of all rollbacks so far, whichever of them the checkpoint has seen.
            engine.lr_factor = self.journal.factor("lr")
        return newest

    def _drop_abandoned(self) -> None:
        """Remove the checkpoints that the last rollback left behind."""
        if not self.journal.entries:
            return
        target = self.journal.entries[-1].to_iteration
        for iteration, content in self.manager.metas().items():
            abandoned = iteration > target and content["run"]["rollbacks"] < len(self.journal)
            if abandoned and distributed.is_rank_zero():
                checkpoint.drop(self.manager.directory, iteration)


def save_best(folder: Path, iteration: int, weights: dict[str, Tensor]) -> None:
    """Keep the weights of a checkpoint that is the best so far."""
    from safetensors.torch import save_file

    with atomic_dir(folder / _best_name(iteration)) as building:
        path = building / "weights.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path)
        fsync_path(path)


def load_best(folder: Path, iteration: int) -> dict[str, Tensor]:
    """Read the weights that :func:`save_best` kept of ``iteration``."""
    from safetensors.torch import load_file

    return load_file(folder / _best_name(iteration) / "weights.safetensors")


def holds_best(folder: Path, iteration: int) -> bool:
    """Whether the weights that :func:`save_best` kept of ``iteration`` are all there."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(
            folder / _best_name(iteration) / "weights.safetensors", framework="pt"
        ) as weights:
            return bool(weights.keys())
    except (OSError, SafetensorError):
        return False


def prune_best(folder: Path, needed: Collection[int]) -> None:
    """Delete the kept weights of all iterations but ``needed``."""
    names = {_best_name(iteration) for iteration in needed}
    for path in folder.glob("iteration-*"):
        if path.name not in names:
            remove_tree(path)


def _best_name(iteration: int) -> str:
    return f"iteration-{iteration:06d}"
