"""Token ids that a workspace keeps of its data files, and that no stage needs any more."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from rlhf_core.data.token_folder import RECORD, TOKENS
from rlhf_core.errors import DataError
from rlhf_core.storage.files import LockFile, read_json, sha256_file

MIB = 1 << 20
UNREAD_DAYS = 30
DAY = 86_400


@dataclass(frozen=True)
class UnneededEntry:
    """A folder of the cache, or part of one, that may go: why, and its bytes."""

    folder: Path
    reason: str
    size: int


def unneeded_entries(workspace: Path) -> list[UnneededEntry]:
    """List what may go of the token cache of ``workspace``, by name."""
    unneeded = []
    digests: dict[str, str] = {}
    for folder in sorted(path for path in (workspace / TOKENS).glob("*") if path.is_dir()):
        reason = _reason_to_go(folder, digests)
        if reason:
            size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            unneeded.append(UnneededEntry(folder, reason, size))
    return unneeded


def _reason_to_go(folder: Path, digests: dict[str, str]) -> str:
    if folder.name.startswith("."):
        return "unfinished"
    try:
        record = read_json(folder / RECORD)
        path, data, read = (
            record["path"],
            record["made_of"]["data"],
            (folder / RECORD).stat().st_mtime,
        )
    except (DataError, OSError, KeyError, TypeError):
        return "damaged"
    if path not in digests:
        digests[path] = sha256_file(Path(path)) if Path(path).is_file() else ""
    if digests[path] != data:
        return f"{Path(path).name} is other data now" if digests[path] else f"{path} is gone"
    return f"not read for {UNREAD_DAYS} days" if time.time() - read > UNREAD_DAYS * DAY else ""


def remove_entries(entries: list[UnneededEntry]) -> None:
    """Delete entries; one that a process is making at this moment stays."""
    for entry in entries:
        key = entry.folder.name.lstrip(".").split(".")[0]
        path = entry.folder.with_name(f".{key}.lock")
        with LockFile(path) as lock:
            if lock.try_acquire():
                shutil.rmtree(entry.folder, ignore_errors=True)
                path.unlink(missing_ok=True)


def clean_token_cache(workspace: Path, *, delete: bool) -> list[str]:
    """List the token ids that no stage needs any more, or delete them; a line for each, none where
    there are none.
    """
    entries = unneeded_entries(workspace)
    if delete:
        remove_entries(entries)
    what = "deleted" if delete else "would be deleted"
    lines = [
        f"  {entry.folder.name}  {entry.size / MIB:.1f} MiB  {what}: {entry.reason}"
        for entry in entries
    ]
    return ["token ids of data files", *lines] if lines else []
