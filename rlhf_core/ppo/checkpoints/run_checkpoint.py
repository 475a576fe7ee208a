"""The partial state of a PPO or critic run on disk, complete enough that a resumed run equals an uninterrupted one."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from rlhf_core.ppo.checkpoints.rollback_journal import Rollback, RollbackJournal
from rlhf_core.runtime import distributed
from rlhf_core.storage.files import atomic_dir, fsync_path, split_json_lines
from rlhf_core.training.checkpoints import checkpoint
from rlhf_core.training.checkpoints.manager import CheckpointManager
from rlhf_core.training.checkpoints.pieces import Piece
from rlhf_core.training.engine import Engine
from rlhf_core.training.rng import rng_state, set_rng_state


class JsonLines:
    """A file of JSON lines that can be cut back to an earlier length, so that replayed rows do not appear twice."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self.path.stat().st_size

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one row. Numbers that are not finite become null, which every JSON reader takes."""
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(nonfinite_as_none(row), ensure_ascii=False, allow_nan=False) + "\n")

    def truncate(self, size: int) -> None:
        """Cut off what was written after the first ``size`` bytes."""
        with self.path.open("r+b") as stream:
            stream.truncate(min(size, self.size))

    def rows(self) -> list[dict[str, Any]]:
        """Read all rows."""
        return [json.loads(line) for line in split_json_lines(self.path.read_text(encoding="utf-8"))]


def nonfinite_as_none(value: Any) -> Any:
    """Replace every number of ``value`` that is not finite by None, in mappings and lists too."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: nonfinite_as_none(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [nonfinite_as_none(item) for item in value]
    return value


@dataclass
class RunCheckpoints:
    """The checkpoints of one run, and what they restore.

    Attributes:
        manager: Writes and reads them.
        engines: The engines of the run by name.
        lines: Its line files by name.
        journal: Its rollbacks.
        keep: How many of the newest checkpoints are kept.
        keep_from: From which iteration on older ones are kept too, for a coming rollback.
    """

    manager: CheckpointManager
    engines: Mapping[str, Engine]
    lines: Mapping[str, JsonLines]
    journal: RollbackJournal
    keep: int
    keep_from: int | None = None

    def save(self, iteration: int, meta: Mapping[str, Any], extra: bool = False) -> None:
        """Save the state after ``iteration`` iterations: engines, generators, line offsets and ``meta`` (JSON).

        It is written in the background; see ``CheckpointManager.save``. An ``extra`` one, of a run that is preempted
        between two regular ones, takes no place of theirs and goes with the next of them: what there is to roll back to
        must not depend on when a run was interrupted.
        """
        tensors, generators = rng_state()
        pieces = {name: Piece.whole(t) for name, t in tensors.items()} if distributed.is_rank_zero() else {}
        engines: dict[str, Any] = {}
        for name, engine in self.engines.items():
            state = engine.state()
            engines[name] = state.meta
            pieces |= {f"{name}/{key}": piece for key, piece in state.pieces.items()}
        content = {
            "run": dict(meta),
            "rng": generators,
            "engines": engines,
            "lines": {name: lines.size for name, lines in self.lines.items()},
            "rollbacks": len(self.journal),
            "extra": extra,
        }
        earlier = self.manager.metas()
        spare = {step for step, meta in earlier.items() if meta["extra"] and not extra}
        keep = len(earlier) + 1 if extra else self.keep
        paths = [lines.path for lines in self.lines.values()]
        self.manager.save(iteration, pieces, content, keep, self.keep_from, spare, paths)

    def metas(self) -> dict[int, dict[str, Any]]:
        """``meta`` of every readable regular checkpoint by its iteration, the one that is being written included."""
        return {step: content["run"] for step, content in self.manager.metas().items() if not content["extra"]}

    def holds(self, iteration: int) -> bool:
        """Whether there is a checkpoint of ``iteration``, regular or extra."""
        return iteration in self.manager.metas()

    def roll_back(self, entry: Rollback) -> None:
        """Decide a rollback, once the checkpoint that it may go back to is on the disk."""
        self.manager.finish()
        self.journal.add(entry)

    def load(self) -> tuple[int, dict[str, Any]] | None:
        """Restore the newest sound checkpoint that no rollback has abandoned.

        Returns:
            Its iteration and ``meta``; None for a fresh start, which clears what a run left that ended before its first
            checkpoint.
        """
        self.manager.finish()
        self._drop_abandoned()
        newest = self.manager.load_latest()
        for name, lines in self.lines.items():
            lines.truncate(int(newest.meta["lines"][name]) if newest else 0)
        if newest is None:
            self.journal.clear()
            return None
        for name, engine in self.engines.items():
            engine.load_state(newest.tensors.under(f"{name}/"), newest.meta["engines"][name])
            # Rates are those of all rollbacks so far, whichever of them the checkpoint has seen.
            engine.lr_factor = self.journal.factor("lr")
        set_rng_state(newest.tensors.all_under("rng."), newest.meta["rng"])
        return newest.step, newest.meta["run"] | {"rollbacks": newest.meta["rollbacks"]}

    def _drop_abandoned(self) -> None:
        """Remove the checkpoints that the last rollback left behind."""
        if not self.journal.entries:
            return
        target = self.journal.entries[-1].to_iteration
        for iteration, content in self.manager.metas().items():
            if iteration > target and content["rollbacks"] < len(self.journal) and distributed.is_rank_zero():
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


def prune_best(folder: Path, needed: Collection[int]) -> None:
    """Delete the kept weights of all iterations but ``needed``."""
    names = {_best_name(iteration) for iteration in needed}
    for path in folder.glob("iteration-*"):
        if path.name not in names:
            shutil.rmtree(path)


def _best_name(iteration: int) -> str:
    return f"iteration-{iteration:06d}"
