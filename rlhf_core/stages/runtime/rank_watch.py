"""Watches the ranks of a stage: says which one the others wait for, and ends them after a while."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from rlhf_core.config.operations import LaunchConfig
from rlhf_core.runtime.rank_marks import STOPPING, Mark, read_marks

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
NOTICES = 10  # in the time after which ranks are ended
SHOW_STACK = signal.SIGUSR1


def show_stack_on_signal() -> None:
    """Let this rank print where it is when its launcher asks, also while it sleeps in C++."""
    faulthandler.register(SHOW_STACK, all_threads=True)


def late_ranks(marks: Mapping[int, Mark]) -> tuple[list[int], str]:
    """The ranks that others wait for, and the operation in which these are; no rank while all
    compute.

    Ranks wait for each other in the same operations in the same order, so whoever has begun the
    fewest is late; a GPU's operations are waited for after they have begun. Where all have begun
    the same one, those that are still in it are named: what they wait for does not arrive.
    """
    most = max(mark.operations for mark in marks.values())
    behind = [rank for rank, mark in marks.items() if mark.operations < most]
    inside = [rank for rank, mark in marks.items() if mark.operation not in ("", STOPPING)]
    waiting_in = [mark.operation for mark in marks.values() if mark.operations == most]
    return sorted(behind or inside), max(waiting_in) or "its last operation"


class RankWatch:
    """Context manager that watches the ranks which leave their marks in ``folder``.

    Args:
        stage: Name of the stage.
        folder: Where the ranks leave their marks.
        config: How many there are on all machines, and how long they may wait for a late one.
        stop_grace: Seconds that they may do so once the stage has been told to stop.
        stop_requested: Whether it has been.
        send: Sends a signal to the ranks of this machine.
    """

    def __init__(
        self,
        stage: str,
        folder: Path,
        config: LaunchConfig,
        stop_grace: float,
        stop_requested: Callable[[], bool],
        send: Callable[[int], object],
    ) -> None:
        self.stage, self.folder, self.ranks = stage, folder, config.ranks
        self.timeout, self.stop_grace = float(config.rank_timeout), stop_grace
        self._stop_requested, self._send = stop_requested, send
        self.verdict: str | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)

    def __enter__(self) -> RankWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        marks: dict[int, Mark] = {}
        moved = time.monotonic()
        told_to_stop: float | None = None
        notices = 1
        while not self._ended.wait(POLL_SECONDS):
            now = time.monotonic()
            if told_to_stop is None and self._stop_requested():
                told_to_stop = now
            found = read_marks(self.folder)
            if found != marks:
                marks, moved, notices = found, now, 1
                continue
            if len(marks) < self.ranks:
                continue  # torch gives up on ranks that do not begin
            late, operation = late_ranks(marks)
            if not late:
                continue
            waited = now - moved
            since_stop = now - max(moved, told_to_stop) if told_to_stop is not None else 0.0
            behind = (
                f"{self.stage}: ranks have waited {waited:.0f} s in {operation} for "
                f"{self._named(late, marks)}"
            )
            if waited >= self.timeout:
                self._give_up(
                    late,
                    marks,
                    f"{behind} (compute.launch.{self.stage}.rank_timeout)",
                )
                return
            if (
                told_to_stop is not None
                and since_stop >= self.stop_grace
                and not _are_stopping(marks)
            ):
                self._give_up(
                    late,
                    marks,
                    f"{behind}, {since_stop:.0f} s after SIGTERM (flow.stop_grace_seconds)",
                )
                return
            if waited >= notices * self.timeout / NOTICES:
                notices += 1
                logger.warning(
                    "%s; all are ended after %.0f s (compute.launch.%s.rank_timeout)",
                    behind, self.timeout, self.stage,
                )  # fmt: skip

    def _give_up(self, late: list[int], marks: Mapping[int, Mark], why: str) -> None:
        self.verdict = (
            f"{why}; all were ended, and the same command goes on from the last checkpoint"
        )
        for rank in late:
            if marks[rank].host == socket.gethostname():
                with suppress(OSError):
                    os.kill(marks[rank].process, SHOW_STACK)
        self._ended.wait(POLL_SECONDS)  # in which the stacks are printed
        self._send(signal.SIGKILL)

    def _named(self, late: list[int], marks: Mapping[int, Mark]) -> str:
        names = []
        for rank in late:
            mark = marks[rank]
            names.append(f"rank {rank} of {self.ranks} (process {mark.process} on {mark.host})")
        return ", ".join(names)


def _are_stopping(marks: Mapping[int, Mark]) -> bool:
    """Whether a rank has come to the point at which all save their state: that may take long."""
    return any(mark.operation == STOPPING for mark in marks.values())
