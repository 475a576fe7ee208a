"""A small language model and a short recipe for the public functions, and a reward that is a Python
function.
"""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from unit.training.tiny import SHAPE, text

import rlhf_core as rlhf
from rlhf_core.config.model import CheckpointConfig
from rlhf_core.config.ppo import SelectionConfig
from rlhf_core.models.causal_lm import new_model, train_tokenizer

LanguageModel = tuple[PreTrainedModel, PreTrainedTokenizerBase]
RATE = rlhf.OptimizerConfig(lr=1e-3, schedule="constant", warmup=0.0)
PPO: dict[str, Any] = {
    "iterations": 3,
    "warmup_iterations": 1,
    "batch_size": 4,
    "max_new_tokens": 6,
    "policy_optimizer": RATE,
    "critic_optimizer": RATE,
    "ptx": rlhf.PtxConfig(weight=0.0),
    "selection": SelectionConfig(every=1),
    "checkpoint": CheckpointConfig(every=1),
    "health": rlhf.HealthConfig(mode="report"),
}
CRITIC_FREE = {
    "advantage": {"estimator": "rloo"},
    "replies_per_prompt": 2,
    "critic_optimizer": None,
}
QUESTIONS = [text(i, 3) for i in range(12)]


def by_length(prompts: list[list[dict[str, str]]], replies: list[str]) -> list[float]:
    """A reward for tests: the number of characters."""
    assert all(prompt[-1]["content"] in QUESTIONS for prompt in prompts)
    return [float(len(reply)) for reply in replies]


@pytest.fixture(scope="module")
def llama() -> LanguageModel:
    """A Llama whose tokenizer has a chat template."""
    tokenizer = train_tokenizer([text(i, 5) for i in range(20)], SHAPE.vocab_size)
    return new_model(SHAPE, tokenizer, seed=1), tokenizer
