"""Architectures without scaled-dot-product attention are loaded with their plain one, and the plan counts that."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Gemma2Config, LlamaConfig
from transformers import PretrainedConfig as Config

from rlhf_core.memory.architecture import Architecture
from rlhf_core.memory.dry_run import ModelVariant, model_size
from rlhf_core.models.heads import ScalarModel
from rlhf_core.models.io import attention_of, load_model

SIZES = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8,
}  # fmt: skip


@pytest.mark.parametrize(("config", "attention"), [(LlamaConfig(**SIZES), "sdpa"), (Gemma2Config(**SIZES), "eager")])
def test_what_the_architecture_has(config: Config, attention: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")  # folders have one; nothing here reads it
    model = load_model(AutoModelForCausalLM, tmp_path, None)
    critic = ScalarModel.from_causal_lm(tmp_path, seed=0)
    for config in (model.config, critic.model.config):
        assert config._attn_implementation == attention
    ids = torch.tensor([[5, 6, 7, 8]])
    for later in (torch.tensor([[5, 6, 7, 9]]), torch.tensor([[5, 6, 1, 2]])):
        same = model(ids).logits[:, :2], model(later).logits[:, :2]
        torch.testing.assert_close(*same)


def test_the_plan_builds_them_too() -> None:
    architecture = Architecture.of(Gemma2Config(**SIZES).to_dict(), "gemma")
    own = sum(p.numel() for p in AutoModelForCausalLM.from_config(Gemma2Config(**SIZES)).parameters())
    assert model_size(ModelVariant(architecture, "causal_lm", "float32")).parameters == own


def test_an_unknown_architecture_is_left_to_the_library() -> None:
    assert attention_of(AutoModelForSequenceClassification, Config()) == "sdpa"
