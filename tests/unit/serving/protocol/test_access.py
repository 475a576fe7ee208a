"""Only loopback without a token, and only the token with one."""

from __future__ import annotations

import pytest

from rlhf_core.errors import ConfigError
from rlhf_core.serving.protocol.access import ApiError, checked_token, require_access


def test_only_loopback_needs_no_token() -> None:
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        assert checked_token(None, host) is None and checked_token("", host) is None
    for host in ("0.0.0.0", "::", "192.168.0.1", "example.org"):
        with pytest.raises(ConfigError, match="set RLHF_SERVE_TOKEN"):
            checked_token(None, host)
        assert checked_token("secret", host) == "secret"
    for token in ("two words", "schlüssel", "line\nbreak"):
        with pytest.raises(ConfigError, match="use letters"):
            checked_token(token, "127.0.0.1")


def test_only_the_token_opens() -> None:
    for authorization in ("Bearer secret", "bearer  secret"):
        require_access("secret", authorization, "any.example")
    for refused in (None, "", "secret", "Basic secret", "Bearer", "Bearer secreT", "Bearer é"):
        with pytest.raises(ApiError) as error:
            require_access("secret", refused, "127.0.0.1")
        assert error.value.status == 401 and error.value.headers == {"WWW-Authenticate": "Bearer"}


def test_without_a_token_only_loopback_names_open() -> None:
    for host in ("127.0.0.1:8000", "localhost", "[::1]:8000"):
        require_access(None, None, host)
    for refused in ("rebound.example:8000", "", None, "127.0.0.1.example", "10.0.0.1", "[", "[::1"):
        with pytest.raises(ApiError, match="loopback only"):
            require_access(None, None, refused)
