"""Reading what a command appends to its log file."""

from __future__ import annotations

from pathlib import Path


class LogReader:
    """Reads the part of a log file that was appended after the reader was created; the file may not exist yet."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.start = log.stat().st_size if log.exists() else 0

    def text(self, last_bytes: int | None = None) -> str:
        """Return everything appended so far, or only its last ``last_bytes`` bytes."""
        if not self.log.exists():
            return ""
        start = self.start if last_bytes is None else max(self.start, self.log.stat().st_size - last_bytes)
        with self.log.open("rb") as stream:
            stream.seek(start)
            return stream.read().decode("utf-8", errors="replace")
