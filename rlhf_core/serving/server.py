"""One server process: its socket, its log, and a stop that lets replies in flight end."""

from __future__ import annotations

import logging
import math
import socket
import sys
from dataclasses import dataclass

import uvicorn
from fastapi import FastAPI

from rlhf_core.errors import ConfigError

LOG_FORMAT = "%(asctime)s %(levelname)s %(message)s"
BACKLOG = 2048


@dataclass(frozen=True)
class BoundAddress:
    """An address that this process has taken. Connections are refused until it listens."""

    socket: socket.socket
    host: str
    port: int

    @property
    def url(self) -> str:
        """The base address of the API, as clients are given it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/v1"

    def listen(self) -> None:
        """Accept connections; they wait until the server runs."""
        self.socket.listen(BACKLOG)


def bind(host: str, port: int) -> BoundAddress:
    """Take ``port``, or any free one for 0.

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
        raise ConfigError(f"cannot listen on {host} port {port} ({reason}); choose another with --port") from error
    return BoundAddress(bound, host, int(bound.getsockname()[1]))


def run_server(app: FastAPI, address: BoundAddress, timeout_seconds: float) -> None:
    """Serve until SIGTERM or SIGINT; then accept nothing more and wait for the replies in flight.

    A second SIGINT ends at once. The signals reach the handlers of the process afterwards.

    Args:
        timeout_seconds: The most that one request takes.
    """
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format=LOG_FORMAT)
    logging.getLogger("rlhf_core.serving").setLevel(logging.INFO)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=math.ceil(timeout_seconds) + 1,
    )
    uvicorn.Server(config).run(sockets=[address.socket])
