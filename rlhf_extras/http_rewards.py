"""The reward source ``http``: a server that scores replies, as settings name it and as it is asked."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import httpx
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from rlhf_core.config.model import check_endpoint
from rlhf_core.config.reward_sources import SourceConfig
from rlhf_core.errors import DataError
from rlhf_extras.http_retry import (
    RetriesExhausted,
    bearer_token,
    describe_answer,
    json_content,
    post_json,
)

if TYPE_CHECKING:
    from rlhf_core.ppo.reward_sources.source import Replies

RESUMES = "start it and run again: training goes on from its last checkpoint"


class HttpSource(SourceConfig):
    """A scorer behind HTTP.

    Attributes:
        url: Its address, which is posted `{"items": [{"prompt", "reply", "finished"}]}` and answers
            `{"scores"}`.
        batch_size: Replies of a request.
        timeout_seconds: Bounds connecting, and the whole request after it.
        retries: How often a request is repeated that fails to connect, times out or is answered
            with 408, 425, 429 or 5xx; it waits 0.5 s, 1 s, 2 s … (at most 30 s; or as the answer's
            Retry-After says, up to 60 s).
        token_env: Environment variable with the bearer token, which itself never stands in
            params.yaml.
    """

    kind: Literal["http"] = "http"
    url: str
    batch_size: PositiveInt = 64
    timeout_seconds: PositiveFloat = 30.0
    retries: NonNegativeInt = 5
    token_env: str | None = None

    @model_validator(mode="after")
    def _no_secrets(self) -> HttpSource:
        check_endpoint(self.url, self.token_env)
        return self

    def make_scorer(self, workspace: Path) -> HttpScorer:
        """Return what posts replies to the server."""
        return HttpScorer(self, f"reward source '{self.name or self.kind}' ({self.url})")


class HttpScorer:
    """Posts replies to a scorer in batches and reads their scores.

    Retries back off, and ``wait`` sleeps between them.

    Request: ``POST url`` with JSON
    ``{"items": [{"prompt": [{"role", "content"}, ...], "reply": text, "finished": bool}, ...]}``.
    Answer: status 200 with JSON ``{"scores": [number, ...]}``, one finite number per item, in the
    same order.
    """

    may_decline = False

    def __init__(
        self, config: HttpSource, who: str, wait: Callable[[float], None] = time.sleep
    ) -> None:
        self.config, self.who, self.wait = config, who, wait
        self.token = bearer_token(config.token_env, who)
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        self.client = httpx.Client(timeout=config.timeout_seconds, headers=headers)

    def __call__(self, replies: Replies) -> list[float]:
        """Return a score for each reply.

        Raises:
            DataError: The scorer stays unreachable or does not keep the contract.
        """
        from rlhf_core.ppo.reward_sources.source import checked_scores  # with torch

        items: list[dict[str, Any]] = []
        answered = zip(replies.prompts, replies.texts, replies.finished, strict=True)
        for prompt, text, finished in answered:
            turns = [asdict(turn) for turn in prompt]
            items.append({"prompt": turns, "reply": text, "finished": finished})
        scores: list[Any] = []
        for start in range(0, len(items), self.config.batch_size):
            scores += self._scores_of(items[start : start + self.config.batch_size])
        return checked_scores(scores, len(items), self.who)

    def _scores_of(self, items: list[dict[str, Any]]) -> list[Any]:
        """Return what the server answers for the items of one request."""
        try:
            answer = post_json(
                self.client,
                self.config.url,
                {"items": items},
                retries=self.config.retries,
                wait=self.wait,
                secret=self.token,
            )
        except RetriesExhausted as error:
            raise DataError(f"{self.who} {error}; {RESUMES}") from error
        said = f"{self.who} {describe_answer(answer, self.token)}"
        if answer.status_code != 200:
            raise DataError(f"{said}; status 200 with scores is needed")
        content = json_content(answer)
        scores = content.get("scores") if isinstance(content, dict) else None
        if not isinstance(scores, list):
            raise DataError(f"{said}; a JSON object with a list 'scores' is needed")
        if len(scores) != len(items):
            raise DataError(
                f"{self.who} gave {len(scores)} scores for {len(items)} items; one per item is needed"
            )
        return scores
