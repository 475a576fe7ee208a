"""Each rank marks in a small file when it begins to wait for the others, and when it goes on.

A collective sleeps in C++, so a rank cannot say itself who keeps it waiting. The launcher reads the
marks of all ranks and can.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

FOLDER_VARIABLE = "RLHF_RANK_MARKS"
SIZE = 256
STOPPING = "stopping"


@dataclass(frozen=True)
class Mark:
    """Where one rank is.

    Attributes:
        operations: How many operations it has begun in which ranks wait for each other.
        operation: The one that it is in; empty while it computes.
        host: Its machine.
        process: Its process there.
    """

    operations: int
    operation: str
    host: str
    process: int


class MarkFile:
    """The file in which this rank marks where it is."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._operations = 0
        self._where = ("", "")

    def open(self, rank: int) -> None:
        """Mark from now on, if a launcher has named a folder for it."""
        folder = os.environ.get(FOLDER_VARIABLE)
        if folder and self._file is None:
            self._where = (socket.gethostname(), str(os.getpid()))
            # Only this user reads it, and no link is followed.
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._file = os.open(Path(folder) / str(rank), flags, 0o600)

    @contextmanager
    def waiting(self, operation: str) -> Iterator[None]:
        """Mark that this rank waits for the others inside the block."""
        if self._file is None:
            yield
            return
        self._operations += 1
        self._write(operation)
        yield
        self._write("")

    def stopping(self) -> None:
        """Mark that all ranks have agreed to save their state and stop."""
        if self._file is not None:
            self._write(STOPPING)

    def _write(self, operation: str) -> None:
        assert self._file is not None
        words = (str(self._operations), operation, *self._where)
        os.pwrite(self._file, "\t".join(words).encode().ljust(SIZE), 0)


def read_marks(folder: Path) -> dict[int, Mark]:
    """The marks of the ranks that have made one, by rank."""
    marks = {}
    for file in folder.iterdir() if folder.is_dir() else ():
        try:
            words = file.read_text(encoding="utf-8", errors="replace").strip(" ").split("\t")
        except FileNotFoundError:  # another machine, which ended first, has removed the folder
            continue
        if file.name.isdigit() and len(words) == 4:
            operations, operation, host, process = words
            marks[int(file.name)] = Mark(int(operations), operation, host, int(process))
    return marks
