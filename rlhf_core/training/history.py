"""The training history: one JSON line per block of steps, cut back to the checkpoint when a run resumes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_core.files import atomic_write_text

# Fields that depend on the clock: the only ones in which a resumed run may differ from an uninterrupted one.
CLOCK_FIELDS = ("seconds", "tokens_per_second")


class History:
    """Records with a ``step`` (optimiser steps done), appended to ``path`` as they come."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[dict[str, Any]] = []

    def resume_at(self, step: int | None) -> None:
        """Keep the records up to ``step`` (none for ``None``): what came after the checkpoint happens again."""
        kept = [] if step is None else [r for r in read_history(self.path) if r["step"] <= step]
        self.records = kept
        atomic_write_text(self.path, "".join(_line(record) for record in kept))

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record, on disk when this returns. Non-finite numbers are left out (JSON has none)."""
        finite = {k: v for k, v in record.items() if not isinstance(v, float) or math.isfinite(v)}
        self.records.append(finite)
        with open(self.path, "a", encoding="utf-8") as stream:
            stream.write(_line(finite))
            stream.flush()
            os.fsync(stream.fileno())


class Block:
    """Means over the steps since the last record. Non-finite figures (of skipped steps) do not enter a mean."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.counts: dict[str, int] = {}

    def add(self, figures: Mapping[str, float]) -> None:
        """Take in the figures of one step."""
        for name, value in figures.items():
            if math.isfinite(value):
                self.sums[name] = self.sums.get(name, 0.0) + value
                self.counts[name] = self.counts.get(name, 0) + 1

    def means(self) -> dict[str, float]:
        """The means, after which the block is empty."""
        means = {name: total / self.counts[name] for name, total in self.sums.items()}
        self.sums, self.counts = {}, {}
        return means

    def state(self) -> dict[str, Any]:
        """As JSON."""
        return {"sums": self.sums, "counts": self.counts}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state`."""
        self.sums, self.counts = dict(state["sums"]), dict(state["counts"])


def read_history(path: Path) -> list[dict[str, Any]]:
    """The records of a history file. A last line cut short by a crash is left out; a missing file has none."""
    records: list[dict[str, Any]] = []
    if not path.is_file():
        return records
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, allow_nan=False) + "\n"
