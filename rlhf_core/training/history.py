"""The training history: one JSON line per block of steps, truncated to the checkpoint when a run resumes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_core.storage.files import atomic_write_text

# Fields that depend on the clock, in which alone a resumed run may differ from an uninterrupted one.
CLOCK_FIELDS = ("seconds", "tokens_per_second")


class History:
    """Records with a ``step`` (optimiser steps made), appended to ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[dict[str, Any]] = []

    def resume_at(self, step: int | None) -> None:
        """Keep the records up to ``step`` (none for ``None``); later ones are of steps that will be made again."""
        kept = [] if step is None else [r for r in read_history(self.path) if r["step"] <= step]
        self.records = kept
        atomic_write_text(self.path, "".join(_line(record) for record in kept))

    def append(self, record: Mapping[str, Any]) -> None:
        """Append one record and flush it to disk. Non-finite numbers are left out, since JSON has none."""
        finite = {k: v for k, v in record.items() if not isinstance(v, float) or math.isfinite(v)}
        self.records.append(finite)
        with open(self.path, "a", encoding="utf-8") as stream:
            stream.write(_line(finite))
            stream.flush()
            os.fsync(stream.fileno())


class Block:
    """Means of metrics over the steps since the last record, without the non-finite values of skipped steps."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.counts: dict[str, int] = {}

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add the metrics of one step."""
        for name, value in metrics.items():
            if math.isfinite(value):
                self.sums[name] = self.sums.get(name, 0.0) + value
                self.counts[name] = self.counts.get(name, 0) + 1

    def means(self) -> dict[str, float]:
        """Return the means and start an empty block."""
        means = {name: total / self.counts[name] for name, total in self.sums.items()}
        self.sums, self.counts = {}, {}
        return means

    def state(self) -> dict[str, Any]:
        """The block as JSON."""
        return {"sums": self.sums, "counts": self.counts}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state`."""
        self.sums, self.counts = dict(state["sums"]), dict(state["counts"])


def read_history(path: Path) -> list[dict[str, Any]]:
    """Read a history file. A last line cut short by a crash is left out; a missing file has no records."""
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
