"""The hashes that dvc.lock records."""

from __future__ import annotations

from pathlib import Path

from rlhf_core.config.loading.yaml_text import plain, read


def recorded_hash(workspace: Path, path: str) -> str | None:
    """The hash that dvc.lock records for the out ``path``, or None."""
    return recorded_hashes(workspace).get(path)


def recorded_hashes(workspace: Path) -> dict[str, str]:
    """The hashes that dvc.lock records, by the path of the out; none before the first stage has run."""
    lock = workspace / "dvc.lock"
    stages = (plain(read(lock)) if lock.is_file() else {}).get("stages") or {}
    outs = (out for stage in stages.values() for out in stage.get("outs") or [])
    return {out["path"]: str(out["md5"]) for out in outs if "md5" in out}
