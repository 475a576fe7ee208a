"""An OpenAI-compatible endpoint for chat completions: a rate limit, retries, answers read with care."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from rlhf_core.config.evaluation import LlmBudgetConfig, LlmJudgeConfig
from rlhf_core.data.text import writable
from rlhf_core.errors import DataError
from rlhf_core.runtime.http_retry import AnswerLimits, bearer_token, describe_answer, is_final, post_json
from rlhf_core.storage.files import atomic_write_json, read_json

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
    """Asks an OpenAI-compatible endpoint; several threads may share it. ``wait`` sleeps for so many seconds.

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
        text = writable(content) if isinstance(content, str) else ""
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


class AnswerCache:
    """Keeps each answer as soon as it is there, so that an evaluation that was stopped asks for the others alone.

    Files are written atomically and hold the request beside the answer. Several processes may use the same folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, key: str) -> Completion | None:
        """Return the answer to a request; None if there is none, or its file is damaged."""
        try:
            stored = read_json(self._path(key))
            text, *counts = stored["text"], stored["prompt_tokens"], stored["completion_tokens"]
        except (DataError, KeyError, TypeError, ValueError, RecursionError, OSError):
            return None
        are_counts = all(count is None or token_count(count) is not None for count in counts)
        return Completion(text, *counts) if isinstance(text, str) and are_counts else None

    def put(self, key: str, request: dict[str, Any], completion: Completion) -> None:
        """Store the answer to a request."""
        answer = asdict(completion)
        del answer["refused"]
        atomic_write_json(self._path(key), {"request": request} | answer)

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.json"


class UsageMeter:
    """Counts tokens and money; several threads may share it."""

    def __init__(self, budget: LlmBudgetConfig) -> None:
        self.budget = budget
        self.prompt_tokens = self.completion_tokens = 0
        self._lock = threading.Lock()

    @property
    def cost(self) -> float:
        """Money, 0 without prices."""
        return self.budget.cost(self.prompt_tokens, self.completion_tokens)

    def add(self, completion: Completion) -> None:
        """Count an answer.

        Raises:
            DataError: There is a budget, and the endpoint does not say what the answer used.
        """
        if completion.refused:
            return
        if self.budget.is_limited and None in (completion.prompt_tokens, completion.completion_tokens):
            raise DataError("the endpoint does not say how many tokens it used, so evaluate.llm_judge.budget "
                            "cannot be kept; take the budget out")  # fmt: skip
        with self._lock:
            self.prompt_tokens += completion.prompt_tokens or 0
            self.completion_tokens += completion.completion_tokens or 0

    def require_budget(self) -> None:
        """Allow another request.

        Raises:
            DataError: The budget is spent.
        """
        tokens, budget = self.prompt_tokens + self.completion_tokens, self.budget
        if budget.tokens is not None and tokens >= budget.tokens:
            raise DataError(f"the budget of {budget.tokens:,} tokens is spent ({tokens:,} used); raise "
                            "evaluate.llm_judge.budget.tokens to go on")  # fmt: skip
        if budget.money is not None and self.cost >= budget.money:
            raise DataError(f"the budget of {budget.money:g} is spent ({self.cost:.4g} used); raise "
                            "evaluate.llm_judge.budget.money to go on")  # fmt: skip
