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
class ListeningSocket:
    """A socket that accepts connections; they wait until a server takes them."""

    socket: socket.socket
    host: str
    port: int

    @property
    def url(self) -> str:
        """The base address of the API, as clients are given it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/v1"


def listen(host: str, port: int) -> ListeningSocket:
    """Listen on ``port``, or on any free one for 0.

    Raises:
        ConfigError: The address or port cannot be used.
    """
    try:
        (family, kind, _, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        listening = socket.socket(family, kind)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot listen on {host} port {port} ({reason}); choose another with --port") from error
    return ListeningSocket(listening, host, int(listening.getsockname()[1]))


def run_server(app: FastAPI, listening: ListeningSocket, timeout_seconds: float) -> None:
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
    uvicorn.Server(config).run(sockets=[listening.socket])
