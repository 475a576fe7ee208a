"""The history of a run: JSON lines that a resume cuts back to its checkpoint."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf_core.storage.files import naming, split_json_lines

# Fields that depend on the clock, in which alone a resumed run may differ from an uninterrupted
# one.
CLOCK_FIELDS = ("seconds", "tokens_per_second")


class History:
    """A file of JSON lines that can be cut back to an earlier length.

    Repeated steps then do not appear twice.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    def mark(self) -> dict[str, Any]:
        """What a checkpoint must know of the lines written so far.

        That is their length in bytes and their hash.
        """
        content = self.path.read_bytes()
        return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}

    def begins_as(self, mark: Mapping[str, Any]) -> bool:
        """Whether the file still begins with the lines that ``mark`` was taken of."""
        try:
            content = self.path.read_bytes()[: int(mark["bytes"])]
        except OSError:
            return False
        return hashlib.sha256(content).hexdigest() == str(mark["sha256"])

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one row. Numbers that are not finite become null, which every JSON reader takes."""
        with naming(self.path), self.path.open("a", encoding="utf-8") as stream:
            stream.write(
                json.dumps(nonfinite_as_none(row), ensure_ascii=False, allow_nan=False) + "\n"
            )

    def truncate(self, size: int) -> None:
        """Cut off what was written after the first ``size`` bytes."""
        with self.path.open("r+b") as stream:
            stream.truncate(min(size, self.path.stat().st_size))

    def rows(self) -> list[dict[str, Any]]:
        """Read all rows."""
        return read_history(self.path)


class Block:
    """Means of metrics over the steps since the last record.

    Values of skipped steps that are not finite are left out.
    """

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
        self.sums, self.counts = dict(state["sums"]), dict(state["counts"])


def nonfinite_as_none(value: Any) -> Any:
    """Replace every number of ``value`` that is not finite by None, in mappings and lists too."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: nonfinite_as_none(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [nonfinite_as_none(item) for item in value]
    return value


def none_as_nan(value: float | None) -> float:
    """Undo :func:`nonfinite_as_none` for one number."""
    return math.nan if value is None else value


def read_history(path: Path) -> list[dict[str, Any]]:
    """Read a history file. A line cut short by a crash is left out; a missing file has no rows."""
    rows: list[dict[str, Any]] = []
    if not path.is_file():
        return rows
    for line in split_json_lines(path.read_text(encoding="utf-8")):
        with suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows
