"""The question about a pair, as text and as the body of a chat completion."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from rlhf_core.config.evaluation import TEMPLATE_FIELDS, LlmJudgeConfig
from rlhf_core.data.schema import Message

PACKAGE = "rlhf_core.evaluation.judges.llm"
FIELD = re.compile("|".join(map(re.escape, TEMPLATE_FIELDS)))
VERDICT_SCHEMA = {
    "type": "object",
    "properties": {"reason": {"type": "string"}, "verdict": {"type": "string", "enum": ["A", "B", "tie"]}},
    "required": ["reason", "verdict"],
    "additionalProperties": False,
}


def built_in_template() -> str:
    """Return the text that is used where ``llm_judge.template`` is null."""
    return files(PACKAGE).joinpath("pairwise_prompt.txt").read_text(encoding="utf-8")


def question_text(template: str, prompt: Sequence[Message], reply_a: str, reply_b: str) -> str:
    """Fill the template. A reply that contains ``{reply_b}`` stays what it is."""
    values = {
        "{conversation}": "\n\n".join(f"{turn.role}: {turn.content}" for turn in prompt),
        "{reply_a}": reply_a,
        "{reply_b}": reply_b,
    }
    text = FIELD.sub(lambda field: values[field.group()], template)
    return text.encode("utf-8", "replace").decode()  # a lone surrogate cannot be sent


def request_body(config: LlmJudgeConfig, text: str) -> dict[str, Any]:
    """Return the body of a chat completion that asks ``text`` at temperature 0."""
    body: dict[str, Any] = {
        "model": config.model,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": config.max_tokens,
    }
    if config.response_format == "json_object":
        body["response_format"] = {"type": "json_object"}
    if config.response_format == "json_schema":
        body["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "verdict", "strict": True, "schema": VERDICT_SCHEMA},
        }
    return body


def content_key(base_url: str, body: dict[str, Any]) -> str:
    """Return the SHA-256 of a request: the endpoint and everything that is asked of it."""
    return hashlib.sha256(json.dumps([base_url.rstrip("/"), body], sort_keys=True).encode()).hexdigest()
