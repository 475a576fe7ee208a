"""Processes that a benchmark asks for one run after another, so that several systems can take turns."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO

LAST_WORDS = 2000  # characters of a failed process's log


class Worker:
    """A process that answers each line of its input with a line that begins with ``answer``; other output is its own.

    It is ready after the constructor, in which it answers its start.

    Args:
        command: The process; it ends when its input does, with ``stack``.
        answer: What its answers begin with.
        environment: Its variables; None for those of this process.
        first: A line that it reads before it answers its start, if any.
        log: Where its warnings go; None for those of this process. Its end is shown when the process fails.
    """

    def __init__(
        self,
        command: Sequence[str],
        stack: ExitStack,
        answer: str,
        environment: Mapping[str, str] | None = None,
        first: str | None = None,
        log: IO[str] | None = None,
    ) -> None:
        self._program, self._answer, self._log = command[0], answer, log
        pipe = subprocess.PIPE
        self._process = stack.enter_context(
            subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True, env=environment)
        )
        assert self._process.stdin is not None
        stack.callback(self._process.stdin.close)
        if first is not None:
            self._write(first)
        self._read()

    def ask(self) -> list[float]:
        """Have it make one run; return the numbers of its answer."""
        self._write("")
        return [float(number) for number in self._read().split()]

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def _read(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(self._answer):
                return line.removeprefix(self._answer)
        said = ""
        if self._log is not None:
            said = ":\n" + Path(self._log.name).read_text(errors="replace")[-LAST_WORDS:]
        raise SystemExit(f"a process of {self._program} ended with status {self._process.wait()}{said}")
