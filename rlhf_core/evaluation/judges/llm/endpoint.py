"""An OpenAI-compatible endpoint for chat completions: a rate limit, retries, answers read with care."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from rlhf_core.config.evaluation import LlmJudgeConfig
from rlhf_core.errors import DataError
from rlhf_core.runtime.http_retry import AnswerLimits, bearer_token, describe_answer, is_final, post_json

REFUSED = frozenset({400, 413, 422})  # of one request, such as a prompt that is too long for the model
LARGEST_ANSWER = 8 << 20  # bytes: far more than any model says
MOST_TOKENS = 10**9  # of a count that an endpoint can mean


@dataclass(frozen=True)
class Completion:
    """What a model answered, and what that used; token counts are None where the endpoint does not give them.

    ``refused`` says why the endpoint did not take the request; empty if it did.
    """

    text: str
    prompt_tokens: int | None
    completion_tokens: int | None
    refused: str = ""


class RateLimiter:
    """Spaces requests so that at most ``per_minute`` begin in a minute; None does not limit."""

    def __init__(
        self,
        per_minute: float | None,
        wait: Callable[[float], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.interval = 60.0 / per_minute if per_minute else 0.0
        self.wait, self.clock = wait, clock
        self._lock = threading.Lock()
        self._next_start = clock()

    def acquire(self) -> None:
        """Wait until the next request may begin."""
        with self._lock:
            now = self.clock()
            start = max(now, self._next_start)
            self._next_start = start + self.interval
        if start > now:
            self.wait(start - now)


class ChatEndpoint:
    """Asks an OpenAI-compatible endpoint; several threads may share it.

    Args:
        config: Address, model and limits.
        wait: Sleeps for so many seconds, between attempts and for the rate limit.
        clock: Monotonic seconds.

    Raises:
        ConfigError: The environment variable of the token is not set, or holds no token.
    """

    def __init__(
        self, config: LlmJudgeConfig, wait: Callable[[float], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.config, self.wait = config, wait
        self.url = f"{config.base_url.rstrip('/')}/chat/completions"
        self.token = bearer_token(config.token_env, "llm judge")
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        self.client = httpx.Client(timeout=config.timeout_seconds, headers=headers)
        self.rate = RateLimiter(config.requests_per_minute, wait, clock)

    def complete(self, body: dict[str, Any]) -> Completion:
        """Ask once, with retries.

        Raises:
            RetriesExhausted: The endpoint stayed out of reach, or gave no whole answer.
            DataError: It refuses every request, such as for a wrong token or an unknown model.
        """
        self.rate.acquire()
        answer = post_json(
            self.client,
            self.url,
            body,
            retries=self.config.retries,
            wait=self._wait_for_retry,
            secret=self.token,
            final=lambda answer: is_final(answer) and (answer.status_code != 200 or _message(answer) is not None),
            limits=AnswerLimits(LARGEST_ANSWER, self.config.timeout_seconds),
        )
        if answer.status_code in REFUSED:
            return Completion("", None, None, refused=describe_answer(answer, self.token))
        message = _message(answer) if answer.status_code == 200 else None
        if message is None:
            raise DataError(f"{self.url} {describe_answer(answer, self.token)}; check base_url, model and token_env")
        content, usage = message.get("content"), answer.json().get("usage")
        # A lone surrogate cannot be written to a file.
        text = content.encode("utf-8", "replace").decode() if isinstance(content, str) else ""
        text = text.replace(self.token, "***") if self.token else text  # some proxies answer with the request's headers
        counts = usage if isinstance(usage, dict) else {}
        return Completion(text, token_count(counts.get("prompt_tokens")), token_count(counts.get("completion_tokens")))

    def _wait_for_retry(self, seconds: float) -> None:
        """Sleep; a request that is repeated counts for the rate limit like any other."""
        self.wait(seconds)
        self.rate.acquire()


def _message(answer: httpx.Response) -> dict[str, Any] | None:
    """The message of a chat completion; None if the body is none."""
    try:
        message = answer.json()["choices"][0]["message"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def token_count(value: Any) -> int | None:
    """Return a number of tokens; None for anything that is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_TOKENS else None
