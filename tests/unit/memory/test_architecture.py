"""Starting models from their config.json alone, against transformers' own models and published
figures.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_core.config.base import BaseConfig
from rlhf_core.errors import ConfigError, ModelError
from rlhf_core.models import foreign
from rlhf_core.runtime.limited_call import CallLimits
from rlhf_extras.memory.architecture import (
    LARGEST_CONFIG,
    PUBLISHED_CONFIGS,
    Architecture,
    architecture_of_file,
    starting_architecture,
)
from rlhf_extras.memory.dry_run import ModelVariant, model_size

SMALL = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5, "num_attention_heads": 4,
}  # fmt: skip
CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    ("llama", {"head_dim": 16, "num_key_value_heads": 1, "tie_word_embeddings": False}),
    ("mistral", {"num_key_value_heads": 2, "tie_word_embeddings": False}),
    ("qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    ("gpt2", {}),
]
PUBLISHED = {
    "huggyllama/llama-7b": 6_738_415_616,
    "huggyllama/llama-13b": 13_015_864_320,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
}


@pytest.mark.slow
@pytest.mark.parametrize(("family", "settings"), CONFIGS)
def test_counts_are_those_of_the_built_model(family: str, settings: dict[str, Any]) -> None:
    values = {**SMALL, "num_key_value_heads": 4, "pad_token_id": 0, "num_labels": 1, **settings}
    config = AutoConfig.for_model(family, **values)
    architecture = Architecture.of(json.loads(config.to_json_string(use_diff=False)), family)
    with torch.device("meta"):
        policy = AutoModelForCausalLM.from_config(config)
        scalar = AutoModelForSequenceClassification.from_config(config)
    unembedding = 0 if config.tie_word_embeddings else 300 * 32
    sizes = {
        "causal_lm": sum(p.numel() for p in policy.parameters()),
        "scalar": sum(p.numel() for p in scalar.parameters()),
        "reward": sum(p.numel() for p in scalar.parameters()) + unembedding,
    }
    for head, expected in sizes.items():
        size = model_size(ModelVariant(architecture, head, "float32", "weights"))  # type: ignore[arg-type]
        assert (size.parameters, size.trainable) == (expected, expected)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_table_has_the_published_sizes(name: str) -> None:
    architecture = Architecture.of(PUBLISHED_CONFIGS[name], name)
    assert (
        model_size(ModelVariant(architecture, "causal_lm", "bfloat16")).parameters
        == PUBLISHED[name]
    )


@pytest.mark.slow
def test_what_is_no_language_model_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for text, message in (
        ('{"model_type": "nonsense"}', "is not the config.json of a known model"),
        ('{"hidden_size": 3}', "names no model_type"),
        ("[]", "names no model_type"),
        ('{"model_type": "vit"}', "is of type 'vit', which is no decoder-only language model"),
        ('{"model_type": "bert"}', "is an encoder, which reads a text in both directions"),
        ('{"model_type": "t5"}', "is an encoder-decoder"),
        ("{", "is not valid JSON"),
    ):
        file.write_text(text)
        with pytest.raises(ModelError, match=message) as refusal:
            starting_architecture(BaseConfig(source=str(tmp_path)), tmp_path)
        assert "\n" not in str(refusal.value) and len(str(refusal.value)) < len(str(file)) + 200
    with pytest.raises(ModelError, match="cannot be read"):
        starting_architecture(BaseConfig(), tmp_path, tmp_path / "missing.json")
    with pytest.raises(ConfigError, match="must be a multiple of"):
        starting_architecture(BaseConfig(hidden_size=30), tmp_path)


def test_the_vocabulary_of_a_model_from_nothing_is_known_once_it_is_made(tmp_path: Path) -> None:
    base = BaseConfig()
    assert starting_architecture(base, tmp_path).config().vocab_size == 1024
    built = {
        "model_type": "llama", "vocab_size": 814, "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": True, "max_position_embeddings": 512,
    }  # fmt: skip
    (tmp_path / "models" / "base").mkdir(parents=True)
    (tmp_path / "models" / "base" / "config.json").write_text(json.dumps(built))
    assert starting_architecture(base, tmp_path).config().vocab_size == 814
    # A model made by other settings says nothing about this one.
    assert starting_architecture(BaseConfig(layers=5), tmp_path).config().vocab_size == 1024


LLAMA = {"model_type": "llama", **SMALL, "max_position_embeddings": 64}
GEMMA = {"model_type": "gemma3", "text_config": {"num_hidden_layers": 2_000_000}}
ODD_CONFIGS: dict[str, object] = {
    "layers of a part": GEMMA,
    "an activation that is none": {**LLAMA, "hidden_act": "__import__('os').system('id')"},
    "rotations of an unknown kind": {**LLAMA, "rope_scaling": {"type": "evil"}},
    "a width that is no machine's": {**LLAMA, "hidden_size": 10**25},
    "a vocabulary that overflows": {**LLAMA, "vocab_size": 10**18},
    "deep": '{"model_type": "llama", "a": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "large": '{"model_type": "llama", "a": "' + "a" * LARGEST_CONFIG + '"}',
    "a number": '{"model_type": "llama", "vocab_size": ' + "9" * 5000 + "}",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ODD_CONFIGS)
def test_a_config_that_no_model_can_have_is_one_line(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign, "LIMITS", CallLimits(cpu_seconds=4))
    content = ODD_CONFIGS[kind]
    file = tmp_path / "config.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ModelError, match=r"^[^\n]{20,700}$"):
        model_size(ModelVariant(architecture_of_file(file), "causal_lm", "float32", "weights"))


@pytest.mark.parametrize("path", ["/dev/zero", "."])
def test_what_is_no_file_is_no_config(path: str) -> None:
    with pytest.raises(ModelError, match="is no file; give a complete model folder"):
        architecture_of_file(Path(path))


def test_two_million_layers_of_one_kind_can_be_planned(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 2_000_000}))
    assert architecture_of_file(tmp_path / "config.json").config().num_hidden_layers == 2_000_000
