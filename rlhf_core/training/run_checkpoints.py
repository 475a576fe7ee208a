"""The partial state of a run on disk, complete enough that a resumed run equals an uninterrupted one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_core.runtime import distributed
from rlhf_core.training.checkpoints.manager import CheckpointManager
from rlhf_core.training.checkpoints.pieces import Piece
from rlhf_core.training.engine import Engine
from rlhf_core.training.history import History
from rlhf_core.training.rng import rng_state, set_rng_state


@dataclass
class RunCheckpoints:
    """The checkpoints of one run, and what they restore.

    Attributes:
        manager: Writes and reads them.
        engines: The engines of the run by name.
        lines: Its line files by name.
        keep: How many of the newest checkpoints are kept.
        keep_from: From which step on older ones are kept too, for a coming rollback.
    """

    manager: CheckpointManager
    engines: Mapping[str, Engine]
    lines: Mapping[str, History]
    keep: int
    keep_from: int | None = None

    def save(self, step: int, meta: Mapping[str, Any], extra: bool = False) -> None:
        """Save the state after ``step`` steps or iterations: engines, generators, line offsets and ``meta`` (JSON).

        It is written in the background; see ``CheckpointManager.save``. An ``extra`` checkpoint is that of a run that
        is preempted between two regular ones. It does not count among the kept ones and is deleted with the next
        regular one: what there is to roll back to must not depend on when a run was interrupted.
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
            "extra": extra,
        }
        earlier = self.manager.metas()
        spare = {number for number, other in earlier.items() if other["extra"] and not extra}
        keep = len(earlier) + 1 if extra else self.keep
        paths = [lines.path for lines in self.lines.values()]
        self.manager.save(step, pieces, content, keep, self.keep_from, spare, paths)

    def metas(self) -> dict[int, dict[str, Any]]:
        """``meta`` of every readable regular checkpoint by its step, the one that is being written included."""
        return {step: content["run"] for step, content in self.manager.metas().items() if not content["extra"]}

    def holds(self, step: int) -> bool:
        """Whether there is a checkpoint of ``step``, regular or extra."""
        return step in self.manager.metas()

    def load(self) -> tuple[int, dict[str, Any]] | None:
        """Restore the newest sound checkpoint.

        Returns:
            Its step and ``meta``; None for a fresh start, which clears what a run left that ended before its first
            checkpoint.
        """
        self.manager.finish()
        newest = self.manager.load_latest()
        for name, lines in self.lines.items():
            lines.truncate(int(newest.meta["lines"][name]) if newest else 0)
        if newest is None:
            return None
        for name, engine in self.engines.items():
            engine.load_state(newest.tensors.under(f"{name}/"), newest.meta["engines"][name])
        set_rng_state(newest.tensors.all_under("rng."), newest.meta["rng"])
        return newest.step, newest.meta["run"]
