"""A good model folder, and copies of it for tests to damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM
from transformers import PreTrainedTokenizerFast as Tokenizer
from unit.training.tiny import SHAPE, text

from rlhf_core.models.causal_lm import new_model, train_tokenizer
from rlhf_core.models.io import save_folder


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return train_tokenizer([text(i, 5) for i in range(20)], SHAPE.vocab_size)


@pytest.fixture(scope="session")
def model(tokenizer: Tokenizer) -> LlamaForCausalLM:
    return new_model(SHAPE, tokenizer, seed=3).eval()


@pytest.fixture(scope="session")
def good(
    model: LlamaForCausalLM, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("good") / "source"
    save_folder(folder, model, tokenizer)
    return folder


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    """A copy of a good model, for the test to change."""
    return Path(shutil.copytree(good, tmp_path / "source"))
