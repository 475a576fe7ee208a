"""Who may ask the server: whoever has the bearer token.

Without one, programs on the machine that address it as loopback.
"""

from __future__ import annotations

import hmac
import ipaddress
from urllib.parse import urlsplit

from rlhf_core.errors import ConfigError
from rlhf_core.serving.protocol import ApiError

TOKEN_VARIABLE = "RLHF_SERVE_TOKEN"


def is_loopback(host: str) -> bool:
    """Whether ``host`` can be reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def checked_token(token: str | None, host: str) -> str | None:
    """Return the token that clients must send to a server on ``host``, None if they need none.

    Raises:
        ConfigError: ``host`` is not a loopback address and there is no token, or the token cannot
            be sent in a header.
    """
    if not token:
        if is_loopback(host):
            return None
        raise ConfigError(
            f"--host {host} lets other machines ask; set {TOKEN_VARIABLE} to a secret that clients must send "
            "(openssl rand -hex 24), or leave --host out"
        )
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"{TOKEN_VARIABLE} has spaces or characters that a header cannot hold; use letters, digits"
        )
    return token


def require_loopback_name(host: str | None) -> None:
    """Raise ``ApiError`` unless the ``Host`` header is a loopback name."""
    name = host or ""
    try:
        parts = urlsplit(f"//{name}")
        if parts.netloc == name and "@" not in name:  # a user or a path belongs to no Host header
            name = parts.hostname or ""
    except ValueError:  # such as an IPv6 address that lacks a bracket
        pass
    if not is_loopback(name):
        message = f"the server answers on loopback only, not as {name[:100]!r}; set {TOKEN_VARIABLE} to allow other names"
        raise ApiError(403, message, code="host_not_allowed")


def require_access(token: str | None, authorization: str | None, host: str | None) -> None:
    """Raise ``ApiError`` unless a request may be answered.

    Without a token the ``Host`` header must be a loopback name: a web page that has its own name
    resolved to this machine (DNS rebinding) could read the replies otherwise.

    Args:
        token: What clients must send; None for nothing.
        authorization: The header of that name.
        host: The ``Host`` header.
    """
    if token is None:
        return require_loopback_name(host)
    scheme, _, given = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(
        given.strip().encode(), token.encode()
    ):
        message = "send the token of this server: Authorization: Bearer TOKEN"
        raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
