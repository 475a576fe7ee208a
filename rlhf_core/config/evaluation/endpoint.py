"""Addresses of HTTP endpoints in params.yaml, which must hold no secrets."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

SECRET_PARAMETER = re.compile(r"(^|&)[^=&]*(key|token|secret|passw|signature|auth)[^=&]*=", re.IGNORECASE)


def check_endpoint(url: str, token_env: str | None, name: str = "url") -> None:
    """Check an address, called ``name`` in messages, and the name of the variable that holds its bearer token.

    Called on the whole model, so that what may be a secret is not repeated in pydantic's error.

    Raises:
        ValueError: The address is not absolute or carries credentials, or the name is none of a variable.
    """
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ValueError(f"{name} must be an absolute http:// or https:// address")
    if parts.username is not None or parts.password is not None or SECRET_PARAMETER.search(parts.query):
        raise ValueError(f"{name} carries credentials; put them in an environment variable and name it in token_env")
    if token_env is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", token_env):
        raise ValueError("token_env is the name of an environment variable, never the token itself")
