"""Ports on the loopback address."""

from __future__ import annotations

import socket

from rlhf_core.errors import RlhfError

LOOPBACK = "127.0.0.1"


def free_port() -> int:
    """Return a port on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def claim_port(requested: int | None, service: str, option: str = "--port") -> int:
    """Return ``requested`` if it can be bound, or any free port when it is None.

    Raises:
        RlhfError: the port is taken or out of range; the message names ``service`` and the command-line ``option``.
    """
    if requested is None:
        return free_port()
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, requested))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or "out of range"
            raise RlhfError(
                f"port {requested} for {service} cannot be used ({reason}); free it or choose another with {option}"
            ) from error
    return requested
