"""Tiny random models on disk, made once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from rlhf_core.config.base import BaseConfig
from rlhf_core.data.schema import Message, Prompt, content_id
from rlhf_core.evaluation.replies import Reply
from rlhf_core.models.causal_lm import new_model, save_policy, train_tokenizer
from rlhf_core.models.heads import ScalarModel
from rlhf_core.world.questions import all_questions

QUESTIONS = [q for q in all_questions() if q.category in ("fact", "harmful")][::37]


def made_prompt(text: str, category: str, source: str = "world") -> Prompt:
    messages = [Message("user", text)]
    row = {"prompt": [{"role": "user", "content": text}]}
    return Prompt(content_id("prompts", row), messages, category, source, text)


def sums(count: int) -> list[Prompt]:
    """Prompts of a file that is not of the world."""
    return [made_prompt(f"what is {i} and {i}?", "sums", "a file") for i in range(count)]


class LengthJudge:
    """Scores a reply by its characters."""

    def __init__(self, name: str = "reward", absolute_tie: float | None = None) -> None:
        self.name, self.absolute_tie, self.calls = name, absolute_tie, 0

    def score(self, prompts: Sequence[Sequence[Message]], replies: Sequence[Reply]) -> list[float]:
        assert len(prompts) == len(replies)
        self.calls += 1
        return [float(len(reply.text)) for reply in replies]


@pytest.fixture(scope="session")
def prompts() -> list[Prompt]:
    return [made_prompt(question.text, question.category) for question in QUESTIONS]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``sft``, ``policy`` (other weights), ``reward``, ``referee`` and ``judge``, and
    the scores of two test pairs by the first and the last of these three.
    """
    root = tmp_path_factory.mktemp("models")
    tokenizer = train_tokenizer([question.text for question in QUESTIONS], 300)
    shape = BaseConfig(
        vocab_size=300, hidden_size=16, intermediate_size=32, layers=1, heads=2, max_positions=256
    )
    for seed, name in enumerate(("sft", "policy"), start=1):
        save_policy(root / name, new_model(shape, tokenizer, seed), tokenizer)
    for seed, name in enumerate(("reward", "referee", "judge"), start=1):
        ScalarModel.from_causal_lm(root / "sft", seed).save(root / name, tokenizer)
    # Both prefer the first pair's chosen reply; on the second they differ.
    for name, of_chosen in (("reward", [1.0, 1.0]), ("judge", [2.0, -1.0])):
        scores = {"ids": ["a", "b"], "chosen": of_chosen, "rejected": [0.0, 0.0]}
        (root / f"{name}_scores.json").write_text(json.dumps(scores))
    return root
