"""A reward source behind HTTP: batches, timeouts, retries with back-off.

Request: ``POST url`` with JSON ``{"items": [{"prompt": [{"role", "content"}, ...], "reply": text, "finished": bool},
...]}``. Answer: status 200 with JSON ``{"scores": [number, ...]}``, one finite number per item, in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx
from torch import Tensor

from rlhf_core.config.reward_sources import HttpSource
from rlhf_core.errors import DataError
from rlhf_core.ppo.reward_sources.source import Replies, checked_rewards
from rlhf_core.runtime.http_retry import RetriesExhausted, bearer_token, describe_answer, post_json

RESUMES = "start it and run again: training goes on from its last checkpoint"


class HttpScorer:
    """Posts replies to a scorer and reads their scores.

    ``wait`` sleeps between attempts.
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
        try:
            return post_json(
                self.client, self.config.url, body, retries=self.config.retries, wait=self.wait, secret=self.token
            )
        except RetriesExhausted as error:
            raise DataError(f"{self.who} {error}; {RESUMES}") from error

    def _scores_of(self, answer: httpx.Response) -> list[Any]:
        if answer.status_code != 200:
            raise DataError(f"{self.who} {describe_answer(answer, self.token)}; status 200 with scores is needed")
        try:
            scores = answer.json()["scores"]
        except (ValueError, KeyError, TypeError):
            scores = None
        if not isinstance(scores, list):
            raise DataError(
                f"{self.who} {describe_answer(answer, self.token)}; a JSON object with a list 'scores' is needed"
            )
        return scores
