"""Calls under limits: tried in a child process, where what they do to themselves does no harm."""

from __future__ import annotations

import errno
import faulthandler
import os
import resource
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

from rlhf_core.errors import is_panic
from rlhf_core.runtime.machine import data_size

OUT_OF_MEMORY, PANIC = 3, 4
POLL_SECONDS = (0.002, 0.05)
GIB = 1024**3


@dataclass(frozen=True)
class CallLimits:
    """What a call may take.

    Attributes:
        cpu_seconds: Time of one processor; waiting for a disk or a network costs none.
        seconds: Time by the clock, for what waits without end.
        memory: Bytes beyond those that this process holds.
    """

    cpu_seconds: int = 60
    seconds: float = 600.0
    memory: int = 4 * GIB


def limit_reached(call: Callable[[], object], limits: CallLimits) -> str | None:
    """Try ``call`` in a child process, and say which limit ended it; None where none did.

    The child is a fork, so that nothing is imported anew: the call should start no thread and use
    no GPU.
    """
    with warnings.catch_warnings():
        # Of forks beside threads, of which the child uses none.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _run_and_exit(call, limits)
    deadline, pause = time.monotonic() + limits.seconds, POLL_SECONDS[0]
    status: int | None = None
    try:
        while status is None and time.monotonic() < deadline:
            ended, code = os.waitpid(child, os.WNOHANG)
            status = code if ended else None
            if status is None:
                time.sleep(pause)
                pause = min(2 * pause, POLL_SECONDS[1])
    finally:
        if status is None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    if status is None:
        return f"took more than {limits.seconds:.0f} s"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number in (signal.SIGXCPU, signal.SIGKILL):
            return f"took more than {limits.cpu_seconds} s of a processor, or all memory"
        return f"ended its process by {signal.Signals(number).name}, as for want of memory"
    if os.WEXITSTATUS(status) == OUT_OF_MEMORY:
        return f"took more than {limits.memory / GIB:.1f} GiB of memory"
    if os.WEXITSTATUS(status) == PANIC:
        return "makes its library give up"
    return None


def _run_and_exit(call: Callable[[], object], limits: CallLimits) -> None:
    """Run the call as the child, which says nothing and does none of the parent's exit work."""
    code = 0
    try:
        faulthandler.disable()  # it writes to a descriptor of its own
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nothing, stream)
        lower_limit(resource.RLIMIT_CORE, 0)
        lower_limit(resource.RLIMIT_CPU, limits.cpu_seconds)
        if (held := data_size()) is not None:
            lower_limit(resource.RLIMIT_DATA, held + limits.memory)
        call()
    except BaseException as error:  # the parent meets it again, and names it
        cause: BaseException | None = error
        while cause is not None:
            if is_panic(cause):
                code = PANIC
            full = isinstance(cause, OSError) and cause.errno == errno.ENOMEM
            if full or isinstance(cause, MemoryError) or "allocate memory" in str(cause):
                code = OUT_OF_MEMORY
            cause = cause.__cause__ or cause.__context__
    finally:
        os._exit(code)


def lower_limit(kind: int, value: int) -> None:
    """Bound a resource of this process, as far as a bound that holds already allows."""
    _, hard = resource.getrlimit(kind)
    wanted = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (wanted, hard))
