"""Only loopback without a token, and only the token with one."""

from __future__ import annotations

import pytest

from rlhf_core.errors import ConfigError
from rlhf_core.serving.protocol.access import ApiError, checked_token, require_access


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_no_token(host: str) -> None:
    assert checked_token(None, host) is None and checked_token("", host) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.1", "example.org"])
def test_other_addresses_need_a_token(host: str) -> None:
    with pytest.raises(ConfigError, match="set RLHF_SERVE_TOKEN"):
        checked_token(None, host)
    assert checked_token("secret", host) == "secret"


@pytest.mark.parametrize("token", ["two words", "schlüssel", "line\nbreak"])
def test_a_token_that_no_header_can_hold_is_refused(token: str) -> None:
    with pytest.raises(ConfigError, match="use letters"):
        checked_token(token, "127.0.0.1")


@pytest.mark.parametrize("authorization", ["Bearer secret", "bearer  secret"])
def test_the_token_opens(authorization: str) -> None:
    require_access("secret", authorization, "any.example")


@pytest.mark.parametrize("authorization", [None, "", "secret", "Basic secret", "Bearer", "Bearer secreT", "Bearer é"])
def test_anything_else_does_not(authorization: str | None) -> None:
    with pytest.raises(ApiError) as error:
        require_access("secret", authorization, "127.0.0.1")
    assert error.value.status == 401 and error.value.headers == {"WWW-Authenticate": "Bearer"}


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "[::1]:8000"])
def test_without_a_token_loopback_names_open(host: str) -> None:
    require_access(None, None, host)


@pytest.mark.parametrize("host", ["rebound.example:8000", "", None, "127.0.0.1.example", "10.0.0.1", "[", "[::1"])
def test_without_a_token_a_page_under_another_name_is_refused(host: str | None) -> None:
    with pytest.raises(ApiError, match="loopback only"):
        require_access(None, None, host)
