"""The bodies of responses: chat completions, whole and as server-sent events, and the list of models."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

END_OF_STREAM = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Usage:
    """Token counts of a request. The end marker of the reply counts."""

    prompt_tokens: int
    completion_tokens: int

    def as_dict(self) -> dict[str, int]:
        """The counts and their sum."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


@dataclass(frozen=True)
class CompletionId:
    """What all parts of one response share.

    Attributes:
        model: The revision that answers.
        created: Seconds since 1970.
    """

    model: str
    created: int
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")

    def completion(self, text: str, finish_reason: str, usage: Usage) -> dict[str, Any]:
        """The whole response."""
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}
        return {**self._head("chat.completion"), "choices": [choice], "usage": usage.as_dict()}

    def first_event(self) -> bytes:
        """The event that opens a stream: the role, no text."""
        return self._chunk({"role": "assistant", "content": ""}, None)

    def text_event(self, piece: str) -> bytes:
        """The next piece of the reply."""
        return self._chunk({"content": piece}, None)

    def last_event(self, finish_reason: str) -> bytes:
        """The event that ends the reply."""
        return self._chunk({}, finish_reason)

    def usage_event(self, usage: Usage) -> bytes:
        """The token counts, in an event without choices."""
        return event({**self._head("chat.completion.chunk"), "choices": [], "usage": usage.as_dict()})

    def _chunk(self, delta: Mapping[str, str], finish_reason: str | None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return event({**self._head("chat.completion.chunk"), "choices": [choice]})

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def event(content: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n".encode()


def model_entry(name: str, created: int) -> dict[str, Any]:
    """One model of the list."""
    return {"id": name, "object": "model", "created": created, "owned_by": "rlhf-pipeline"}


def model_list(names: Sequence[str], created: int) -> dict[str, Any]:
    """The names by which the policy may be asked, the revision's own first."""
    return {"object": "list", "data": [model_entry(name, created) for name in names]}
