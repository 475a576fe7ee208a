"""The hashes that dvc.lock records."""

from __future__ import annotations

from pathlib import Path

from rlhf_core.config.loading.yaml_text import plain, read


def recorded_hash(workspace: Path, path: str) -> str | None:
    """Return the hash that dvc.lock records for the output ``path``, or None."""
    return recorded_hashes(workspace).get(path)


def recorded_hashes(workspace: Path) -> dict[str, str]:
    """Return the hash of each output that dvc.lock records; empty before the first stage has run."""
    lock = workspace / "dvc.lock"
    stages = (plain(read(lock)) if lock.is_file() else {}).get("stages") or {}
    outputs = (output for stage in stages.values() for output in stage.get("outs") or [])
    return {output["path"]: str(output["md5"]) for output in outputs if "md5" in output}
