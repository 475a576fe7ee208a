"""SIGTERM is a wish to have this place back: a drained node, a time limit, a higher priority, or whoever stops a run.

Training heeds it at its next safe point (a finished optimiser step or iteration), where its state is saved; everything
else stops at once. A second SIGTERM stops training at once too. Whoever gives a grace period sends SIGKILL at its end.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rlhf_core.errors import Preempted

# A guard, a launcher and a cluster's own agent may each pass on the one wish that all of them have heard.
SAME_WISH_SECONDS = 3.0


class StopNow(KeyboardInterrupt):
    """SIGTERM where nothing waits for a safe point. No handler of ordinary errors may swallow it."""


@dataclass
class _State:
    heard: float | None = None  # when the first SIGTERM came
    waiting: bool = False  # whether a safe point will be reached
    leaving: bool = False  # whether the stage is already on its way out
    relay: Callable[[], bool] | None = None


_state = _State()


@contextmanager
def heeded(stage: str) -> Iterator[None]:
    """Handle SIGTERM for the length of ``stage``. ``Preempted`` when one ended it; main thread only."""
    global _state
    _state = _State()
    previous = signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        yield
    except StopNow as stopped:
        raise Preempted(
            f"{stage} was stopped by SIGTERM before it was done; the same command goes on from the last checkpoint, "
            "if there is one"
        ) from stopped
    finally:
        signal.signal(signal.SIGTERM, previous)
        _state = _State()


def _on_sigterm(number: int, frame: Any) -> None:
    if _state.leaving:
        return
    now = time.monotonic()
    first = _state.heard is None
    _state.heard = now if _state.heard is None else _state.heard
    if _state.relay is not None and _state.relay():
        return
    if not first and now - _state.heard < SAME_WISH_SECONDS:
        return
    if first and _state.waiting:
        return
    _state.leaving = True
    raise StopNow


@contextmanager
def at_safe_points() -> Iterator[None]:
    """Inside the block SIGTERM only sets the flag that :func:`wanted` tells of: ask for it at every safe point."""
    _state.waiting = True
    try:
        yield
    finally:
        _state.waiting = False


@contextmanager
def relayed(relay: Callable[[], bool]) -> Iterator[None]:
    """Inside the block SIGTERM is passed on by ``relay``, which says whether there was anybody to hear it."""
    _state.relay = relay
    try:
        yield
    finally:
        _state.relay = None


def heard() -> bool:
    """Whether this process has been sent SIGTERM during the stage."""
    return _state.heard is not None


def wanted() -> bool:
    """Whether any rank has been sent SIGTERM; all ranks ask at the same safe point and get the same answer."""
    from rlhf_core import distributed

    return distributed.any_rank(heard())


def leave(what: str, saved: bool) -> None:
    """Raise ``Preempted`` once every rank is here; ``what`` names the stage and how far it is."""
    from rlhf_core import distributed

    # The rank that writes files is the last to come, and a launcher ends the others as soon as one has gone.
    distributed.any_rank(True)
    _state.leaving = True
    state = "its state is saved, and the same command goes on from there" if saved else "the same command starts it"
    raise Preempted(f"{what} and was stopped there by SIGTERM; {state}")
