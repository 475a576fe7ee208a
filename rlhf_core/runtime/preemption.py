"""SIGTERM as a request to stop, as from a drained node, a time limit or a stopped run.

Training stops at its next safe point (a finished optimiser step or iteration), where its state is
saved; everything else stops at once. A second SIGTERM stops training at once too. Whoever grants a
grace period sends SIGKILL at its end.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from rlhf_core.errors import Preempted

# A supervisor, a launcher and a cluster's own agent may each forward the same request.
SAME_REQUEST_SECONDS = 3.0


class StopNow(KeyboardInterrupt):
    """SIGTERM where no safe point follows.

    As a ``KeyboardInterrupt`` it passes handlers of ordinary errors.
    """


class PreemptionSignal:
    """What SIGTERM does during one stage, from the time that :meth:`handled` is entered."""

    def __init__(self) -> None:
        self._received_at: float | None = None
        self._deferred = False
        self._exiting = False
        self._forward: Callable[[], bool] | None = None

    @contextmanager
    def handled(self, stage: str) -> Iterator[None]:
        """Handle SIGTERM inside the block, in the main thread only.

        Raises:
            Preempted: SIGTERM ended the block before it was done.
        """
        previous = signal.signal(signal.SIGTERM, self._on_sigterm)
        try:
            yield
        except StopNow as stopped:
            raise Preempted(
                f"{stage} was stopped by SIGTERM before it was done; the same command goes on from the last "
                "checkpoint, if there is one"
            ) from stopped
        finally:
            signal.signal(signal.SIGTERM, previous)

    def _on_sigterm(self, number: int, frame: Any) -> None:
        if self._exiting:
            return
        now = time.monotonic()
        first = self._received_at is None
        self._received_at = now if self._received_at is None else self._received_at
        if self._forward is not None and self._forward():
            return
        if not first and now - self._received_at < SAME_REQUEST_SECONDS:
            return
        if first and self._deferred:
            return
        self._exiting = True
        raise StopNow

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Let SIGTERM only set :attr:`received` inside the block.

        Check :meth:`requested` there at every safe point.
        """
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    @contextmanager
    def forwarded(self, forward: Callable[[], bool]) -> Iterator[None]:
        """Pass SIGTERM on inside the block by ``forward``, which returns whether it was received."""
        self._forward = forward
        try:
            yield
        finally:
            self._forward = None

    @property
    def received(self) -> bool:
        """Whether this process has received SIGTERM during the stage."""
        return self._received_at is not None

    def requested(self) -> bool:
        """Whether any rank has received SIGTERM; all ranks ask at the same safe point."""
        from rlhf_core.runtime import distributed

        agreed = distributed.any_rank(self.received)
        if agreed:
            distributed.MARKS.stopping()
        return agreed

    def raise_preempted(self, progress: str, saved: bool) -> NoReturn:
        """End the stage once every rank is here; ``progress`` names the stage and how far it is."""
        from rlhf_core.runtime import distributed

        # Rank 0 writes files and comes last, and a launcher ends the other ranks as soon as one has
        # exited.
        distributed.any_rank(True)
        self._exiting = True
        state = "the same command starts it"
        if saved:
            state = "its state is saved, and the same command goes on from there"
        raise Preempted(f"{progress} and was stopped there by SIGTERM; {state}")
