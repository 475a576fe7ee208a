"""Promotion decisions as immutable reports: one read-only JSON file each under ``.rlhf/promotions``."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlhf_core.files import read_json

FOLDER = Path(".rlhf") / "promotions"


def write_decision(workspace: Path, decision: Mapping[str, Any]) -> Path:
    """Write ``decision`` with its time under a name of its own and return the path. Nothing is ever overwritten: the
    finished file is linked into place, which fails where the name is taken, and is read-only."""
    folder = workspace / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    moment = datetime.now(UTC)
    content = json.dumps({**decision, "time": moment.isoformat(timespec="seconds")}, indent=2, sort_keys=True)
    descriptor, temporary = tempfile.mkstemp(dir=folder, suffix=".part")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(content + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o444)
        return _link(Path(temporary), folder, f"{moment:%Y%m%dT%H%M%S%f}-{decision['action']}")
    finally:
        Path(temporary).unlink(missing_ok=True)


def _link(finished: Path, folder: Path, stem: str) -> Path:
    for attempt in range(1000):
        path = folder / (f"{stem}.json" if attempt == 0 else f"{stem}-{attempt}.json")
        try:
            os.link(finished, path)
        except FileExistsError:
            continue
        return path
    raise FileExistsError(folder / stem)


def read_decisions(workspace: Path) -> list[dict[str, Any]]:
    """All decisions of a workspace, oldest first."""
    return [read_json(path) for path in sorted((workspace / FOLDER).glob("*.json"))]


def match_file(workspace: Path, question: Mapping[str, Any]) -> Path:
    """Where the result of the match about ``question`` is kept: asked again, it is not played again."""
    digest = hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()[:16]
    return workspace / ".rlhf" / "matches" / f"{digest}.json"
