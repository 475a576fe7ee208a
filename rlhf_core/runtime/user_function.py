"""The user's own functions, ``package.module:function`` in params.yaml, run with their rights."""

from __future__ import annotations

import importlib
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, cast

from rlhf_core.errors import ConfigError

UserFunction = Callable[..., Any]


def load_function(target: str, workspace: Path, who: str, signature: str) -> UserFunction:
    """Import the function of ``package.module:function``.

    The workspace's folder is searched last, so that a file in it never takes the place of an
    installed module.

    Args:
        who: What needs the function, for messages.
        signature: How it is called, for messages.

    Raises:
        ConfigError: It cannot be imported, or is no function.
    """
    module, _, name = target.partition(":")
    if str(workspace) not in sys.path:
        sys.path.append(str(workspace))
    try:
        function = getattr(importlib.import_module(module), name, None)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{who}: cannot import {module} ({type(error).__name__}: {error}); it must be installed, on PYTHONPATH or "
            f"in {workspace}"
        ) from error
    if not callable(function):
        what = "nothing" if function is None else f"a {type(function).__name__}"
        raise ConfigError(f"{who}: {name} is {what} in {module}; a function {signature} is needed")
    return cast(UserFunction, function)


def describe_failure(error: BaseException) -> str:
    """Say what a function raised, and in which file and line."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(last.filename).name}, line {last.lineno}"
    return f"raised {type(error).__name__}: {error} ({where})"


class TimeLimitExceeded(BaseException):
    """The time is over; no ``Exception``, so that code under the limit does not catch it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Interrupt the block after ``seconds`` by SIGALRM, which Python's ``re`` looks for too.

    Only the main thread receives signals; in another thread there is no limit.

    Raises:
        TimeLimitExceeded: The block took longer.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise TimeLimitExceeded

    earlier = signal.signal(signal.SIGALRM, interrupt)
    # Again and again, if a bare ``except:`` has swallowed the first.
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier)
