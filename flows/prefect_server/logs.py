"""Prefect's log without tracebacks that say no more than their last line."""

from __future__ import annotations

import asyncio
import copy
import logging
import sys
import traceback
import warnings
from typing import TYPE_CHECKING, Any

import anyio
import httpx
from prefect.exceptions import (
    CancelledRun,
    CrashedRun,
    FailedRun,
    ParameterTypeError,
    PrefectException,
    SignatureMismatchError,
)
from prefect.logging.handlers import APILogHandler, PrefectConsoleHandler, WorkerAPILogHandler
from prefect.utilities import services
from websockets.exceptions import WebSocketException

from rlhf_core.errors import QUOTED_CHARACTERS, named_line

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

# How a server that is away shows itself, a process that is stopped, and a run whose parameters are
# none of its flow's. A service of Prefect that gives up raises a RuntimeError of its own, and calls
# back where no event loop runs.
EXPECTED = (
    OSError,
    httpx.TransportError,
    httpx.HTTPStatusError,
    asyncio.CancelledError,
    anyio.NoEventLoopError,
    WebSocketException,
    ParameterTypeError,
    SignatureMismatchError,
)
# What Prefect raises in their place.
WRAPPERS = (RuntimeError, PrefectException)
GIVEN_UP = "Service exceeded error threshold."
# Loggers of Prefect's own services, whose messages quote whole events.
SERVICES = ("prefect._internal", "prefect.events", "asyncio")
PRINT_EXC = traceback.print_exc
ENDED_RUNS = (FailedRun, CancelledRun, CrashedRun)


class ShortTracebacks(logging.Handler):
    """A handler that writes an outage or a stop in one line, and once how a flow ended."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Drop what Prefect's engine says of a state that the line before has named."""
        return not isinstance(_error(record), ENDED_RUNS) and bool(super().filter(record))

    def format(self, record: logging.LogRecord) -> str:
        """Format ``record``, with an expected error's own line in place of its traceback."""
        error = _error(record)
        if error is None:
            if record.name.startswith(SERVICES):
                record = _in_one_line(record)
        elif _is_expected(error):
            record = _in_one_line(record, f" ({_named(error)})")
        return super().format(record)


class Console(ShortTracebacks, PrefectConsoleHandler):
    """What goes to the terminal or the log file of a process."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        # A service of Prefect that gives up prints what it met past every log.
        services.format_exception = _own_line  # type: ignore[assignment]
        # What starts a job prints so why it could not.
        traceback.print_exc = _print_exc
        # One that gives up where no event loop runs leaves a call of its own behind.
        warnings.filterwarnings("ignore", r"coroutine 'Runner\._handle_\w+' was never awaited")


def _own_line(_: object, error: BaseException, frames: object) -> list[str]:
    """Return an error of a service as :func:`traceback.format_exception` does, in one line."""
    return [_named(error)]


def _print_exc(
    limit: int | None = None, file: SupportsWrite[str] | None = None, chain: bool = True
) -> None:
    """Print the present error as :func:`traceback.print_exc` does, an expected one in one line."""
    error = sys.exc_info()[1]
    if error is not None and _is_expected(error):
        (file or sys.stderr).write(f"{_named(error)}\n")
    else:
        PRINT_EXC(limit, file, chain)


def _named(error: BaseException) -> str:
    """The line of an error, or of each of those that it holds."""
    return "; ".join(dict.fromkeys(named_line(single) for single in _singles(error)))


def _is_expected(error: BaseException) -> bool:
    """Whether an error, each of those that it holds, or what Prefect raised it for is expected."""
    if isinstance(error, BaseExceptionGroup):
        return all(_is_expected(single) for single in error.exceptions)
    if isinstance(error, EXPECTED) or str(error) == GIVEN_UP:
        return True
    cause = error.__cause__
    return cause is not None and isinstance(error, WRAPPERS) and _is_expected(cause)


def _singles(error: BaseException) -> list[BaseException]:
    """The errors that a group and the groups in it hold; else the error itself."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    singles = []
    for held in error.exceptions:
        singles += _singles(held)
    return singles


class Api(ShortTracebacks, APILogHandler):
    """What goes to the page of a flow run."""


class WorkerApi(ShortTracebacks, WorkerAPILogHandler):
    """What goes to the page of a worker."""


def _in_one_line(record: logging.LogRecord, reason: str = "") -> logging.LogRecord:
    """A copy with the beginning of its message and ``reason``, without a traceback."""
    short = copy.copy(record)
    message = " ".join(record.getMessage().split())[:QUOTED_CHARACTERS]
    short.msg, short.args = f"{message}{reason}", ()
    short.exc_info = short.exc_text = None
    return short


def _error(record: logging.LogRecord) -> BaseException | None:
    return record.exc_info[1] if isinstance(record.exc_info, tuple) else None
