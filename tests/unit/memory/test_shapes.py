"""Parameter counts from config.json, against transformers' own models and published figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_core.config.base import BaseConfig
from rlhf_core.errors import ModelError
from rlhf_core.memory.known_shapes import KNOWN
from rlhf_core.memory.shape_sources import starting_shape
from rlhf_core.memory.shapes import shape_of_config

SMALL = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"tie_word_embeddings": False}),
    ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 2}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    ("llama", {"head_dim": 16, "num_key_value_heads": 1, "tie_word_embeddings": False}),
    ("mistral", {"num_key_value_heads": 2, "tie_word_embeddings": False}),
    ("qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
]
PUBLISHED = {
    "huggyllama/llama-7b": 6_738_415_616,
    "huggyllama/llama-13b": 13_015_864_320,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
}


@pytest.mark.parametrize(("family", "settings"), CONFIGS)
def test_counts_are_those_of_the_built_model(family: str, settings: dict[str, Any]) -> None:
    values = {**SMALL, "num_key_value_heads": 4, "pad_token_id": 0, "num_labels": 1, **settings}
    config = AutoConfig.for_model(family, **values)
    shape = shape_of_config(config.to_dict(), family)
    with torch.device("meta"):
        policy = AutoModelForCausalLM.from_config(config)
        scalar = AutoModelForSequenceClassification.from_config(config)
    assert shape.causal_lm == sum(p.numel() for p in policy.parameters())
    assert shape.scalar == sum(p.numel() for p in scalar.parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_table_has_the_published_sizes(name: str) -> None:
    assert KNOWN[name].causal_lm == PUBLISHED[name]


def test_adapters_are_those_that_peft_adds() -> None:
    # By hand: rank 2 on q (32 -> 32) and k (32 -> 16) of three layers.
    shape = shape_of_config({"model_type": "llama", **SMALL, "num_key_value_heads": 2}, "x")
    assert shape.adapters(2, ("q_proj", "k_proj")) == 2 * 3 * (64 + 48)
    assert shape.adapters(2) == 2 * 3 * (2 * 64 + 2 * 48 + 3 * 80)


def test_another_family_and_a_file_that_is_no_config_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(ModelError, match="type 'gpt2'; memory can be planned for llama, mistral, qwen2"):
        starting_shape(BaseConfig(source=str(tmp_path)), tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(ModelError, match="has no hidden_size"):
        starting_shape(BaseConfig(source=str(tmp_path)), tmp_path)
    with pytest.raises(ModelError, match="cannot be read"):
        starting_shape(BaseConfig(), tmp_path, tmp_path / "missing.json")


def test_the_vocabulary_of_a_model_from_nothing_is_known_once_it_is_made(tmp_path: Path) -> None:
    base = BaseConfig()
    assert starting_shape(base, tmp_path).vocabulary == 1024
    built = {
        "model_type": "llama", "vocab_size": 814, "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": True, "max_position_embeddings": 512,
    }  # fmt: skip
    (tmp_path / "models" / "base").mkdir(parents=True)
    (tmp_path / "models" / "base" / "config.json").write_text(json.dumps(built))
    assert starting_shape(base, tmp_path).vocabulary == 814
    # A model made by other settings says nothing about this one.
    assert starting_shape(BaseConfig(layers=5), tmp_path).vocabulary == 1024
