"""Files outside the package that results depend on, written down by path and hash so that DVC sees a change."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rlhf_core.files import atomic_write_text, sha256_file
from rlhf_core.fingerprint.stages import FOLDER


def write_sources(workspace: Path, sources: Iterable[str], name: str = "sources", notes: Iterable[str] = ()) -> None:
    """Refresh ``.fingerprints/NAME.txt``: path and content hash of every source file, so that DVC sees a change.

    Hashes are remembered by size and modification time in ``.rlhf/NAME.json``. A hub id counts by its name. ``notes``
    are lines that come first.
    """
    memory = workspace / ".rlhf" / f"{name}.json"
    known: dict[str, list[Any]] = json.loads(memory.read_text()) if memory.exists() else {}
    fresh: dict[str, list[Any]] = {}
    lines = [*notes]
    for source in sources:
        files = [] if source.startswith("hub:") else sorted(glob.glob(str(workspace / source), recursive=True))
        lines.append(source)
        for file in (Path(f) for f in files if Path(f).is_file()):
            status = file.stat()
            mark = [status.st_size, status.st_mtime_ns]
            old = known.get(str(file))
            fresh[str(file)] = old if old and old[:2] == mark else [*mark, sha256_file(file)]
            lines.append(f"  {file.name} {fresh[str(file)][2]}")
    path = workspace / FOLDER / f"{name}.txt"
    text = "\n".join(lines) + "\n"
    if not path.exists() or path.read_text() != text:
        atomic_write_text(path, text)
    if fresh != known:
        atomic_write_text(memory, json.dumps(fresh, indent=1))
