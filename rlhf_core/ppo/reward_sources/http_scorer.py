"""A scorer behind HTTP: batches, timeouts, retries with back-off.

Request: ``POST url`` with JSON ``{"items": [{"prompt": [{"role", "content"}, ...], "reply": text, "finished": bool},
...]}``. Answer: status 200 with JSON ``{"scores": [number, ...]}``, one finite number per item, in the same order.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import httpx
from torch import Tensor

from rlhf_core.config.reward_sources import HttpSource
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.ppo.reward_sources.source import Replies, checked_scores

RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
FIRST_WAIT, LONGEST_WAIT, LONGEST_ASKED_WAIT = 0.5, 30.0, 60.0  # seconds
RESUMES = "start it and run again: training goes on from its last checkpoint"


class HttpScorer:
    """``wait`` sleeps between attempts. Waits are not random: one client is no stampede, and no generator moves."""

    def __init__(self, config: HttpSource, who: str, wait: Callable[[float], None] = time.sleep) -> None:
        self.config, self.who, self.wait = config, who, wait
        self.figures: dict[str, float] = {}
        self.token = bearer_token(config.token_env, who)
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        self.client = httpx.Client(timeout=config.timeout_seconds, headers=headers)

    def score(self, replies: Replies) -> Tensor:
        """(B,); ``DataError`` when the scorer stays unreachable or does not keep the contract."""
        items = [
            {"prompt": [{"role": m.role, "content": m.content} for m in prompt], "reply": text, "finished": finished}
            for prompt, text, finished in zip(replies.prompts, replies.texts, replies.finished, strict=True)
        ]
        scores: list[Any] = []
        for start in range(0, len(items), self.config.batch_size):
            part = items[start : start + self.config.batch_size]
            found = self._scores_of(self._post({"items": part}))
            if len(found) != len(part):
                raise DataError(f"{self.who} gave {len(found)} scores for {len(part)} items; one per item is needed")
            scores += found
        return checked_scores(scores, replies, self.who)

    def _post(self, body: dict[str, Any]) -> httpx.Response:
        """The first answer that is not worth another attempt."""
        attempts = self.config.retries + 1
        for attempt in range(attempts):
            asked = 0.0
            try:
                answer = self.client.post(self.config.url, json=body)
            except httpx.RequestError as error:
                problem = f"{type(error).__name__}: {error}".removesuffix(": ")
            else:
                if answer.status_code not in RETRIED:
                    return answer
                problem, asked = self._told(answer), _retry_after(answer)
            if attempt + 1 < attempts:
                self.wait(max(min(FIRST_WAIT * 2**attempt, LONGEST_WAIT), asked))
        raise DataError(f"{self.who} failed {attempts} times, at last with {problem}; {RESUMES}")

    def _scores_of(self, answer: httpx.Response) -> list[Any]:
        if answer.status_code != 200:
            raise DataError(f"{self.who} {self._told(answer)}; status 200 with scores is needed")
        try:
            scores = answer.json()["scores"]
        except (ValueError, KeyError, TypeError):
            scores = None
        if not isinstance(scores, list):
            raise DataError(f"{self.who} {self._told(answer)}; a JSON object with a list 'scores' is needed")
        return scores

    def _told(self, answer: httpx.Response) -> str:
        """Status and the beginning of the answer, without the token should the scorer repeat it."""
        text = answer.text.replace(self.token, "***") if self.token else answer.text
        return f"answered {answer.status_code} {' '.join(text.split())[:120]!r}"


def bearer_token(variable: str | None, who: str) -> str:
    """The value of the environment variable; ``ConfigError`` when it is not set. Empty where none is named."""
    if variable is None:
        return ""
    token = os.environ.get(variable, "").strip()
    if not token:
        raise ConfigError(f"{who}: the environment variable {variable}, named by token_env, is not set")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(f"{who}: the value of {variable} cannot be a bearer token (spaces or unprintable characters)")
    return token


def _retry_after(answer: httpx.Response) -> float:
    """Seconds that the scorer asks to wait, at most a minute; 0 when it does not say so as a number."""
    asked = answer.headers.get("Retry-After", "")
    return min(float(asked), LONGEST_ASKED_WAIT) if asked.isdecimal() else 0.0
