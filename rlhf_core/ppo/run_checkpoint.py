"""The partial state of a PPO or critic run on disk, complete enough that a resumed run equals an uninterrupted one."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from rlhf_core import distributed
from rlhf_core.files import atomic_dir
from rlhf_core.training.checkpoints import checkpoint
from rlhf_core.training.checkpoints.store import CheckpointStore
from rlhf_core.training.engine import Engine, EngineState
from rlhf_core.training.rng import rng_state, set_rng_state


class Lines:
    """A file of JSON lines that can be taken back to an earlier length, so that replayed rows do not appear twice."""

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
            stream.write(json.dumps(finite(row), ensure_ascii=False, allow_nan=False) + "\n")

    def truncate(self, size: int) -> None:
        """Forget what was written after the first ``size`` bytes."""
        with self.path.open("r+b") as stream:
            stream.truncate(min(size, self.size))

    def flush(self) -> None:
        """On disk, before a checkpoint relies on it."""
        with self.path.open("rb") as stream:
            os.fsync(stream.fileno())

    def rows(self) -> list[dict[str, Any]]:
        """All rows."""
        return [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]


def finite(value: Any) -> Any:
    """``value`` with every number that is not finite replaced by None, in mappings and lists too."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


@dataclass(frozen=True)
class RunFiles:
    """The engines and line files of a run, by name, and where its checkpoints go."""

    directory: Path
    engines: Mapping[str, Engine]
    lines: Mapping[str, Lines]
    keep: int
    store: CheckpointStore | None = None

    def save(self, iteration: int, meta: Mapping[str, Any], keep_from: int | None = None, extra: bool = False) -> None:
        """Checkpoint after ``iteration`` iterations: engines, generators, line offsets and ``meta`` (JSON).

        The newest ``keep`` checkpoints stay, and those from iteration ``keep_from`` on. An ``extra`` one, of a run that
        is preempted between two regular ones, takes none of their places and goes with the next of them: what is there
        to roll back to must not depend on when a run was interrupted.
        """
        tensors, generators = rng_state()
        engines: dict[str, Any] = {}
        for name, engine in self.engines.items():
            state = engine.state()
            engines[name] = state.meta
            tensors |= {f"{name}/{key}": tensor for key, tensor in state.tensors.items()}
        for lines in self.lines.values():
            lines.flush()
        sizes = {name: lines.size for name, lines in self.lines.items()}
        content = {"run": dict(meta), "rng": generators, "engines": engines, "lines": sizes, "extra": extra}
        earlier = checkpoint.saved_metas(self.directory)
        spare = {step for step, meta in earlier.items() if meta["extra"] and not extra}
        keep = len(earlier) + 1 if extra else self.keep
        checkpoint.save(self.directory, iteration, tensors, content, keep, keep_from, spare, self.store)

    def metas(self, extra: bool = False) -> dict[int, dict[str, Any]]:
        """``meta`` of every readable checkpoint by its iteration, ``extra`` ones only if asked for. The first rank's
        folder counts."""
        saved = checkpoint.saved_metas(self.directory) if distributed.is_rank_zero() else {}
        found = [[step, meta["run"]] for step, meta in saved.items() if extra or not meta["extra"]]
        return dict(distributed.broadcast_from_rank0(found))

    def holds(self, iteration: int) -> bool:
        """Whether there is a checkpoint of ``iteration``. The first rank's folder counts."""
        return iteration in self.metas(extra=True)

    def drop(self, iteration: int) -> None:
        """Remove the checkpoint of ``iteration``, which the first rank has."""
        if distributed.is_rank_zero():
            checkpoint.drop(self.directory, iteration)

    def load(self) -> tuple[int, dict[str, Any]] | None:
        """Restore the newest sound checkpoint; its iteration and ``meta``, or None for a fresh start.

        A fresh start clears the line files of a run that ended before its first checkpoint.
        """
        found = checkpoint.load_latest(self.directory)
        for name, lines in self.lines.items():
            lines.truncate(int(found.meta["lines"][name]) if found else 0)
        if found is None:
            return None
        for name, engine in self.engines.items():
            engine.load_state(EngineState(_under(found.tensors, f"{name}/"), found.meta["engines"][name]))
        set_rng_state(found.tensors, found.meta["rng"])
        return found.step, found.meta["run"]


def _under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}


def save_best(folder: Path, iteration: int, weights: dict[str, Tensor]) -> None:
    """Keep the weights of a checkpoint that is the best so far."""
    from safetensors.torch import save_file

    with atomic_dir(folder / _best_name(iteration)) as building:
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, building / "weights.safetensors")


def load_best(folder: Path, iteration: int) -> dict[str, Tensor]:
    """The weights that :func:`save_best` kept of ``iteration``."""
    from safetensors.torch import load_file

    return load_file(folder / _best_name(iteration) / "weights.safetensors")


def prune_best(folder: Path, needed: Collection[int]) -> None:
    """Forget the kept weights of all iterations but ``needed``."""
    names = {_best_name(iteration) for iteration in needed}
    for path in folder.glob("iteration-*"):
        if path.name not in names:
            shutil.rmtree(path)


def _best_name(iteration: int) -> str:
    return f"iteration-{iteration:06d}"
