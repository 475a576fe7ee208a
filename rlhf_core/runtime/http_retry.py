"""POST requests to servers that may be busy or away for a while: retries with back-off, secrets out of messages."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from rlhf_core.errors import ConfigError, RlhfError

RETRIED = frozenset({408, 425, 429})  # and every error of a server; gateways have their own beyond 504
FIRST_WAIT, LONGEST_WAIT, LONGEST_REQUESTED_WAIT = 0.5, 30.0, 60.0  # seconds
DESCRIBED_CHARACTERS = 120
LARGEST_ANSWER = 16 << 20  # bytes, decompressed: far more than anything asked for here has
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

    Waits double from half a second to 30 s, or last as long as the server's Retry-After says, at most a minute. They
    have no jitter: there is one client, and the random generators of a run stay where they are.

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
            problem = f"{type(error).__name__}: {error}".removesuffix(": ")
        else:
            if final(answer):
                return answer
            problem, requested_wait = describe_answer(answer, secret), _retry_after(answer)
        if attempt + 1 < attempts:
            wait(max(min(FIRST_WAIT * 2**attempt, LONGEST_WAIT), requested_wait))
    raise RetriesExhausted(f"failed {attempts} times, at last with {problem}")


def _post(client: httpx.Client, url: str, body: dict[str, Any]) -> httpx.Response:
    """Post once, and receive an answer of at most :data:`LARGEST_ANSWER` within the client's time for reading.

    Otherwise a server that sends without end would fill the memory, and one that sends a byte now and then would never
    time out.
    """
    content, seconds = bytearray(), client.timeout.read
    with client.stream("POST", url, json=body) as answer:
        begin = time.monotonic()
        for part in answer.iter_bytes():
            content += part
            if len(content) > LARGEST_ANSWER:
                raise httpx.RequestError(f"the answer has more than {LARGEST_ANSWER >> 20} MiB")
            if seconds is not None and time.monotonic() - begin > seconds:
                raise httpx.ReadTimeout(f"the answer was not whole after {seconds:g} s")
    headers = [(name, value) for name, value in answer.headers.items() if name not in OF_THE_TRANSFER]
    return httpx.Response(answer.status_code, headers=headers, content=bytes(content))


def json_content(answer: httpx.Response) -> Any:
    """What an answer holds; None where that is not JSON, or nested too deeply to be read."""
    try:
        return answer.json()
    except (ValueError, RecursionError):
        return None


def describe_answer(answer: httpx.Response, secret: str) -> str:
    """Return status and the beginning of an answer; ``secret`` in it is masked."""
    text = answer.content.decode(errors="replace")  # not by the charset that the answer names, which may be no text's
    text = text.replace(secret, "***") if secret else text
    return f"answered {answer.status_code} {' '.join(text.split())[:DESCRIBED_CHARACTERS]!r}"


def bearer_token(variable: str | None, who: str) -> str:
    """Read the bearer token from an environment variable; empty where none is named.

    Raises:
        ConfigError: The variable is not set, or holds no token.
    """
    if variable is None:
        return ""
    token = os.environ.get(variable, "").strip()
    if not token:
        raise ConfigError(f"{who}: the environment variable {variable}, named by token_env, is not set")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(f"{who}: the value of {variable} cannot be a bearer token (spaces or unprintable characters)")
    return token


def _retry_after(answer: httpx.Response) -> float:
    """Seconds that the server asks to wait, as a number or a date, at most a minute; 0 for anything else."""
    value = answer.headers.get("Retry-After", "")
    if value.isdecimal():
        return min(float(value), LONGEST_REQUESTED_WAIT)
    try:
        seconds = (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds()
    except (ValueError, TypeError, OverflowError):
        return 0.0
    return min(max(seconds, 0.0), LONGEST_REQUESTED_WAIT)
