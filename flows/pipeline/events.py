"""What the pipeline process tells the command that shows it: one JSON object per line in ``.rlhf/events.jsonl``."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

from flows.workspace.folder import private_path

EVENTS_VARIABLE = "RLHF_EVENTS"
_lock = threading.Lock()


class Events:
    """Appends events; silent when there is nobody to tell (a scheduled run)."""

    def __init__(self, path: str | None) -> None:
        self.path = Path(path) if path else None

    def tell(self, kind: str, **fields: Any) -> None:
        """Append ``{kind, time, **fields}``."""
        if self.path is None:
            return
        line = json.dumps({"kind": kind, "time": time.time(), **fields})
        with _lock, self.path.open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")


class EventReader:
    """Reads what was appended since the last call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0

    def new(self) -> list[dict[str, Any]]:
        """Complete events that have not been returned yet."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as stream:
            stream.seek(self.offset)
            data = stream.read()
        complete = data[: data.rfind(b"\n") + 1]
        self.offset += len(complete)
        return [json.loads(line) for line in complete.splitlines()]


def new_events_file(workspace: Path) -> Path:
    """An empty events file for one run."""
    path = private_path(workspace, "events.jsonl")
    path.write_text("", encoding="utf-8")
    return path
