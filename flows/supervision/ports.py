"""Ports on the loopback address."""

from __future__ import annotations

import socket

from rlhf_core.errors import RlhfError

LOOPBACK = "127.0.0.1"


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def claim_port(wanted: int | None, what: str, option: str = "--port") -> int:
    """``wanted`` if it can be bound, any free port when None; ``RlhfError`` when somebody has it."""
    if wanted is None:
        return free_port()
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, wanted))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or "out of range"
            raise RlhfError(
                f"port {wanted} for {what} cannot be used ({reason}); free it or choose another with {option}"
            ) from error
    return wanted
