"""The folder of the token cache in a workspace, and its entries that nobody needs any more."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlhf_core.errors import DataError
from rlhf_core.storage.files import LockFile, read_json, sha256_file

TOKENS = Path(".rlhf") / "tokens"  # folder of the token cache in a workspace
RECORD = "entry.json"  # what an entry of it was made of; its modification time is when the entry was last read


UNREAD_DAYS = 30
DAY = 86_400


@dataclass(frozen=True)
class UnneededEntry:
    """A folder of the cache that may go.

    Attributes:
        folder: The entry, or what a killed process left of one.
        reason: Why it is not needed.
        size: Its bytes.
    """

    folder: Path
    reason: str
    size: int


def unneeded_entries(workspace: Path) -> list[UnneededEntry]:
    """List what may go of the token cache of ``workspace``, by name."""
    return [
        UnneededEntry(folder, reason, sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()))
        for folder, reason in _unneeded(workspace / TOKENS)
    ]


def remove_entries(entries: list[UnneededEntry]) -> None:
    """Delete entries; one that a process is making at this moment stays."""
    for entry in entries:
        key = entry.folder.name.lstrip(".").split(".")[0]
        path = entry.folder.with_name(f".{key}.lock")
        with LockFile(path) as lock:
            if lock.try_acquire():
                shutil.rmtree(entry.folder, ignore_errors=True)
                path.unlink(missing_ok=True)


def _unneeded(cache: Path) -> Iterator[tuple[Path, str]]:
    digests: dict[str, str] = {}
    for folder in sorted(path for path in cache.glob("*") if path.is_dir()) if cache.is_dir() else []:
        if folder.name.startswith("."):
            yield folder, "unfinished"
            continue
        try:
            record = read_json(folder / RECORD)
            path, data, read = record["path"], record["made_of"]["data"], (folder / RECORD).stat().st_mtime
        except (DataError, OSError, KeyError, TypeError):
            yield folder, "damaged"
            continue
        if path not in digests:
            digests[path] = sha256_file(Path(path)) if Path(path).is_file() else ""
        if digests[path] != data:
            yield folder, f"{Path(path).name} is other data now" if digests[path] else f"{path} is gone"
        elif time.time() - read > UNREAD_DAYS * DAY:
            yield folder, f"not read for {UNREAD_DAYS} days"
