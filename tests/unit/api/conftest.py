"""A small language model for the public functions."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from unit.training.tiny import SHAPE, text

from rlhf_core.models.causal_lm import new_model, train_tokenizer


@pytest.fixture(scope="module")
def llama() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A Llama whose tokenizer has a chat template."""
    tokenizer = train_tokenizer([text(i, 5) for i in range(20)], SHAPE.vocab_size)
    return new_model(SHAPE, tokenizer, seed=1), tokenizer
