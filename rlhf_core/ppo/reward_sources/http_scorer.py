"""A reward source behind HTTP: batches, timeouts, retries with back-off.

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
from rlhf_core.ppo.reward_sources.source import Replies, checked_rewards

RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
FIRST_WAIT, LONGEST_WAIT, LONGEST_REQUESTED_WAIT = 0.5, 30.0, 60.0  # seconds
RESUMES = "start it and run again: training goes on from its last checkpoint"


class HttpScorer:
    """Posts replies to a scorer and reads their scores.

    ``wait`` sleeps between attempts. Waits have no jitter: there is one client, and the random generators of the run
    stay where they are.
    """

    def __init__(self, config: HttpSource, who: str, wait: Callable[[float], None] = time.sleep) -> None:
        self.config, self.who, self.wait = config, who, wait
        self.metrics: dict[str, float] = {}
        self.token = bearer_token(config.token_env, who)
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        self.client = httpx.Client(timeout=config.timeout_seconds, headers=headers)

    def rewards(self, replies: Replies) -> Tensor:
        """(B,).

        Raises:
            DataError: The scorer stays unreachable or does not keep the contract.
        """
        items = [
            {"prompt": [{"role": m.role, "content": m.content} for m in prompt], "reply": text, "finished": finished}
            for prompt, text, finished in zip(replies.prompts, replies.texts, replies.finished, strict=True)
        ]
        scores: list[Any] = []
        for start in range(0, len(items), self.config.batch_size):
            part = items[start : start + self.config.batch_size]
            part_scores = self._scores_of(self._post({"items": part}))
            if len(part_scores) != len(part):
                raise DataError(
                    f"{self.who} gave {len(part_scores)} scores for {len(part)} items; one per item is needed"
                )
            scores += part_scores
        return checked_rewards(scores, replies, self.who)

    def _post(self, body: dict[str, Any]) -> httpx.Response:
        """The first answer that is not worth another attempt."""
        attempts = self.config.retries + 1
        for attempt in range(attempts):
            requested_wait = 0.0
            try:
                answer = self.client.post(self.config.url, json=body)
            except httpx.RequestError as error:
                problem = f"{type(error).__name__}: {error}".removesuffix(": ")
            else:
                if answer.status_code not in RETRIED:
                    return answer
                problem, requested_wait = self._described(answer), _retry_after(answer)
            if attempt + 1 < attempts:
                self.wait(max(min(FIRST_WAIT * 2**attempt, LONGEST_WAIT), requested_wait))
        raise DataError(f"{self.who} failed {attempts} times, at last with {problem}; {RESUMES}")

    def _scores_of(self, answer: httpx.Response) -> list[Any]:
        if answer.status_code != 200:
            raise DataError(f"{self.who} {self._described(answer)}; status 200 with scores is needed")
        try:
            scores = answer.json()["scores"]
        except (ValueError, KeyError, TypeError):
            scores = None
        if not isinstance(scores, list):
            raise DataError(f"{self.who} {self._described(answer)}; a JSON object with a list 'scores' is needed")
        return scores

    def _described(self, answer: httpx.Response) -> str:
        """Status and the beginning of the answer; a bearer token in it is masked."""
        text = answer.text.replace(self.token, "***") if self.token else answer.text
        return f"answered {answer.status_code} {' '.join(text.split())[:120]!r}"


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
    """Seconds that the scorer asks to wait, at most a minute; 0 where its header is no number."""
    seconds = answer.headers.get("Retry-After", "")
    return min(float(seconds), LONGEST_REQUESTED_WAIT) if seconds.isdecimal() else 0.0
