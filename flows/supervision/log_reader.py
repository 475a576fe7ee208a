"""Reading what a command appends to its log file."""

from __future__ import annotations

from pathlib import Path


class LogReader:
    """Reads the part of a log file from byte ``start`` on, by default what is appended after the reader was created.

    The file may not exist yet.
    """

    def __init__(self, log: Path, start: int | None = None) -> None:
        self.log = log
        self.start = start if start is not None else log.stat().st_size if log.exists() else 0

    def text(self, last_bytes: int | None = None) -> str:
        """Return everything appended so far, or only its last ``last_bytes`` bytes."""
        if not self.log.exists():
            return ""
        start = self.start if last_bytes is None else max(self.start, self.log.stat().st_size - last_bytes)
        with self.log.open("rb") as stream:
            stream.seek(start)
            return stream.read().decode("utf-8", errors="replace")
