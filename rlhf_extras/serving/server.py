"""One server process: its socket, its log, and a stop that lets replies in flight end."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import resource
import signal
import socket
import sys
import time
from contextlib import suppress

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from rlhf_core.data.text import TerminalFormatter
from rlhf_core.errors import ConfigError

LOG_FORMAT = "%(asctime)s %(levelname)s %(message)s"
BACKLOG = 2048
MOST_CONNECTIONS = 1024
# From the opening of a connection to the end of a request's head, and so from its next request's
# first byte on.
HEAD_SECONDS = 10.0
WRITE_SECONDS = (
    60.0  # that a client may take to read some of a response for which there is no more room
)
MINUTE = 60.0


def bind(host: str, port: int) -> socket.socket:
    """Take ``port``, or any free one for 0. Connections are refused until :func:`run_server`
    listens.

    Raises:
        ConfigError: The address or port cannot be used.
    """
    try:
        (family, kind, _, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        bound = socket.socket(family, kind)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cannot listen on {host} port {port} ({reason}); choose another with --port"
        ) from error
    return bound


def base_url(host: str, bound: socket.socket) -> str:
    """The base address of the API, as clients are given it."""
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{bound.getsockname()[1]}/v1"


def run_server(app: FastAPI, bound: socket.socket, timeout_seconds: float) -> None:
    """Serve until SIGTERM, SIGHUP or SIGINT; then accept nothing more and wait for the replies in
    flight.

    A second SIGINT ends at once. SIGTERM and SIGINT reach the handlers of the process afterwards.

    Args:
        timeout_seconds: The most that one request takes.
    """
    bound.listen(BACKLOG)  # connections wait until the server runs
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TerminalFormatter(LOG_FORMAT))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("rlhf_extras.serving").setLevel(logging.INFO)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup leaves it
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    most = connection_limit()
    config = uvicorn.Config(
        app,
        http=limited_protocol(most),
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=min(BACKLOG, max(most // 4, 8)),
        timeout_graceful_shutdown=math.ceil(timeout_seconds) + 1,
    )
    for name in ("asyncio", "uvicorn.error"):
        logging.getLogger(name).addFilter(OncePerMinute())
    uvicorn.Server(config).run(sockets=[bound])


def connection_limit() -> int:
    """How many connections this process may hold: what its descriptors leave, after as many as may
    be had are had.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = hard if hard != resource.RLIM_INFINITY else MOST_CONNECTIONS * 4
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    taken = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 64
    # A third is left for connections that are accepted before one is closed, and for files of the
    # registry.
    return max(
        min(MOST_CONNECTIONS, (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - taken) * 2 // 3), 2
    )


def limited_protocol(most: int) -> type[asyncio.Protocol]:
    """uvicorn's protocol for connections of which there are at most so many, none of them silent
    for long.
    """
    waiting: dict[
        LimitedConnection, None
    ] = {}  # connections without a request that is answered, the oldest first
    every: set[LimitedConnection] = set()

    class LimitedConnection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        """Closes itself if the head of a request takes too long, or for a newer connection while
        there are too many.

        One whose client does not read its response is closed, too.
        """

        head_timer: asyncio.TimerHandle | None = None
        write_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            every.add(self)
            super().connection_made(transport)
            self._expect_head()
            if len(every) > most:
                oldest = next(iter(waiting))
                oldest.transport.abort()
                oldest.forget()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is None or self.cycle.response_complete:
                if self.head_timer is None:
                    self._expect_head()
            else:
                self._stop_waiting()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self in every and not self.transport.is_closing():
                waiting[self] = None

        def pause_writing(self) -> None:
            super().pause_writing()
            self.write_timer = self.loop.call_later(WRITE_SECONDS, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._stop_writing()

        def connection_lost(self, error: Exception | None) -> None:
            self._stop_writing()
            self.forget()
            super().connection_lost(error)

        def forget(self) -> None:
            self._stop_waiting()
            every.discard(self)

        def _expect_head(self) -> None:
            waiting[self] = None
            self.head_timer = self.loop.call_later(HEAD_SECONDS, self._close_silent)

        def _stop_waiting(self) -> None:
            waiting.pop(self, None)
            if self.head_timer is not None:
                self.head_timer.cancel()
                self.head_timer = None

        def _stop_writing(self) -> None:
            if self.write_timer is not None:
                self.write_timer.cancel()
                self.write_timer = None

        def _close_silent(self) -> None:
            self.transport.close()

    return LimitedConnection


class OncePerMinute(logging.Filter):
    """Lets a message of the same beginning pass once a minute, and every error.

    asyncio repeats some for each connection that it lacks, and uvicorn for each request that is
    none.
    """

    def __init__(self) -> None:
        super().__init__()
        self._passed: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether ``record`` is the first of its kind in this minute."""
        if record.exc_info and record.name != "asyncio":
            return True
        key, now = record.getMessage()[:60], time.monotonic()
        if now - self._passed.get(key, -math.inf) < MINUTE:
            return False
        self._passed[key] = now
        if len(self._passed) > 100:
            self._passed.clear()
        return True
