"""POST requests to servers that may be busy for a while: retries, no secrets in messages."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from rlhf_core.errors import ConfigError, RlhfError

# And every error of a server; gateways have their own beyond 504.
RETRIED = frozenset({408, 425, 429})
FIRST_WAIT, LONGEST_WAIT, LONGEST_REQUESTED_WAIT = 0.5, 30.0, 60.0  # seconds
DESCRIBED_CHARACTERS = 120
LARGEST_ANSWER = 16 << 20  # bytes: far more than anything asked for here has
# How such events of httpcore end.
CONNECTED = ("connect_tcp.complete", "connect_unix_socket.complete")
OF_THE_TRANSFER = frozenset({"content-encoding", "content-length", "transfer-encoding"})


class RetriesExhausted(RlhfError):
    """Every attempt failed; the message says how often and with what at last."""


def is_final(answer: httpx.Response) -> bool:
    """Return whether the status of ``answer`` is one that another attempt would hardly change."""
    return answer.status_code < 500 and answer.status_code not in RETRIED


def post_json(
    client: httpx.Client,
    url: str,
    body: dict[str, Any],
    *,
    retries: int,
    wait: Callable[[float], object],
    secret: str = "",
    final: Callable[[httpx.Response], bool] = is_final,
) -> httpx.Response:
    """Return the first answer that is not worth another attempt.

    Waits double from half a second to 30 s, or last as long as the server's Retry-After says, at
    most a minute. They have no jitter: there is one client, and the random generators of a run stay
    where they are.

    Args:
        retries: How often a failed request is repeated.
        wait: Sleeps for so many seconds.
        secret: The token, which is masked in messages.
        final: Whether an answer is not worth another attempt.

    Raises:
        RetriesExhausted: The server stayed out of reach, or every answer asked for another attempt.
    """
    attempts = retries + 1
    for attempt in range(attempts):
        requested_wait = 0.0
        try:
            answer = _post(client, url, body)
        except httpx.RequestError as error:
            problem = _masked(f"{type(error).__name__}: {error}".removesuffix(": "), secret)
        else:
            if final(answer):
                return answer
            problem, requested_wait = describe_answer(answer, secret), _retry_after(answer)
        if attempt + 1 < attempts:
            wait(max(min(FIRST_WAIT * 2**attempt, LONGEST_WAIT), requested_wait))
    raise RetriesExhausted(f"failed {attempts} times, at last with {problem}")


def _post(client: httpx.Client, url: str, body: dict[str, Any]) -> httpx.Response:
    """Post once, and receive an answer of bounded size within the client's time for reading.

    Otherwise a server that sends without end would fill the memory, and one that sends a byte now
    and then, of headers as of content, would never time out: httpx bounds each wait for data, and a
    timer that shuts the connection down bounds them all. Compressed answers are refused, since a
    few bytes may unpack to gigabytes.
    """
    content, seconds, late = bytearray(), client.timeout.read, threading.Event()
    # A connection that is kept would not be timed.
    headers = {"Accept-Encoding": "identity", "Connection": "close"}
    with ExitStack() as at_end:

        def bound(event: str, info: dict[str, Any]) -> None:
            if not event.endswith(CONNECTED) or seconds is None:
                return
            # A duplicate, since TLS takes the socket over, and its handshake may be slow too.
            connection = at_end.enter_context(info["return_value"].get_extra_info("socket").dup())

            def shut_down() -> None:
                late.set()
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

            timer = threading.Timer(seconds, shut_down)
            timer.daemon = True
            timer.start()
            # It is cancelled first: the connection must not be closed under it.
            at_end.callback(timer.join)
            at_end.callback(timer.cancel)

        try:
            with client.stream(
                "POST", url, json=body, headers=headers, extensions={"trace": bound}
            ) as answer:
                if answer.headers.get("Content-Encoding", "identity").lower() != "identity":
                    raise httpx.RequestError("the answer is compressed, which was not asked for")
                for part in answer.iter_bytes():
                    content += part
                    if len(content) > LARGEST_ANSWER:
                        raise httpx.RequestError(
                            f"the answer has more than {LARGEST_ANSWER >> 20} MiB"
                        )
        except httpx.RequestError:
            if not late.is_set():
                raise
        # An answer without a length ends with its connection, and seems to be whole.
        if late.is_set():
            raise httpx.ReadTimeout(f"the answer was not whole after {seconds:g} s")
    kept = [(name, value) for name, value in answer.headers.items() if name not in OF_THE_TRANSFER]
    return httpx.Response(answer.status_code, headers=kept, content=bytes(content))


def json_content(answer: httpx.Response) -> Any:
    """Return what an answer holds; None where that is not JSON, or nested too deeply."""
    try:
        return answer.json()
    except (ValueError, RecursionError):
        return None


def describe_answer(answer: httpx.Response, secret: str) -> str:
    """Return status and the beginning of an answer; ``secret`` in it is masked."""
    # Not by the charset that the answer names, which may be no text's.
    text = _masked(answer.content.decode(errors="replace"), secret)
    return f"answered {answer.status_code} {' '.join(text.split())[:DESCRIBED_CHARACTERS]!r}"


def _masked(text: str, secret: str) -> str:
    """Mask ``secret`` as it is, and as Python quotes it in errors about what a server sent."""
    if not secret:
        return text
    escaped = secret.replace("\\", "\\\\")
    for form in (escaped.replace("'", "\\'"), escaped, secret):
        text = text.replace(form, "***")
    return text


def bearer_token(variable: str | None, who: str) -> str:
    """Read the bearer token from an environment variable; empty where none is named.

    Raises:
        ConfigError: The variable is not set, or holds no token.
    """
    if variable is None:
        return ""
    token = os.environ.get(variable, "").strip()
    if not token:
        raise ConfigError(
            f"{who}: the environment variable {variable}, named by token_env, is not set"
        )
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"{who}: the value of {variable} cannot be a bearer token (spaces or unprintable characters)"
        )
    return token


def _retry_after(answer: httpx.Response) -> float:
    """Return the seconds that the server asks to wait, at most a minute; 0 if it does not."""
    value = answer.headers.get("Retry-After", "")
    if value.isdecimal():
        return min(float(value), LONGEST_REQUESTED_WAIT)
    try:
        seconds = (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds()
    except (ValueError, TypeError, OverflowError):
        return 0.0
    return min(max(seconds, 0.0), LONGEST_REQUESTED_WAIT)
