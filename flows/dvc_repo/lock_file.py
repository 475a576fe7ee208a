"""What dvc.lock records: hashes of files, and the parameters that a stage ran with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlhf_core.config.yaml_text import plain, read

LOCK_FILE = "dvc.lock"


@dataclass(frozen=True)
class RecordedStage:
    """The last successful run of a stage.

    Attributes:
        inputs: Hash of each file or folder that it read, by its path.
        outputs: Hash of each one that it wrote.
        params: Values of params.yaml by the dotted name that dvc.yaml gives them.
    """

    inputs: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)


def recorded_stages(workspace: Path) -> dict[str, RecordedStage]:
    """Return what dvc.lock records of each stage by its name; empty before the first stage has run."""
    lock = workspace / LOCK_FILE
    if not lock.is_file():
        return {}
    status = lock.stat()
    return dict(_recorded_stages(lock, (status.st_ino, status.st_size, status.st_mtime_ns)))


@lru_cache(maxsize=4)
def _recorded_stages(lock: Path, _: tuple[int, ...]) -> Mapping[str, RecordedStage]:
    """Read a file of that inode, size and time. It is read several times in a registration, and slowly: 0.2 s."""
    stages = (plain(read(lock)) or {}).get("stages") or {}
    return {
        name: RecordedStage(
            _hashes(stage.get("deps")), _hashes(stage.get("outs")), (stage.get("params") or {}).get("params.yaml") or {}
        )
        for name, stage in stages.items()
    }


def recorded_hash(workspace: Path, path: str) -> str | None:
    """Return the hash that dvc.lock records for the output ``path``, or None."""
    stages = recorded_stages(workspace).values()
    return next((stage.outputs[path] for stage in stages if path in stage.outputs), None)


def _hashes(entries: Any) -> dict[str, str]:
    return {entry["path"]: str(entry["md5"]) for entry in entries or [] if "md5" in entry}
