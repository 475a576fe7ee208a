"""An exported folder computes the same in transformers 4, whose names for rotary embeddings differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from flows.release.export import earlier_rope, write_earlier_names
from rlhf_core.models.starting.base import train_tokenizer

SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED |= {"original_max_position_embeddings": 64}


# The values were computed with in transformers 4.57.1: the logits are those of 5.23.0.
@pytest.mark.parametrize(
    ("model_type", "parameters", "earlier"),
    [
        ("llama", {"rope_type": "default", "rope_theta": 1e5}, {"rope_theta": 1e5}),
        ("qwen3", {"rope_theta": 1e6}, {"rope_theta": 1e6}),
        ("llama", {"rope_theta": 5e5, **SCALED}, {"rope_theta": 5e5, "rope_scaling": SCALED}),
        ("phi", {"rope_theta": 1e4, "partial_rotary_factor": 0.5}, {"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        (
            "gpt_neox",
            {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.5},
            {"rotary_emb_base": 5e4, "rotary_pct": 0.5},
        ),
        (
            "gemma3_text",
            {"full_attention": {"rope_theta": 1e6, **SCALED}, "sliding_attention": {"rope_theta": 2e4}},
            {"rope_theta": 1e6, "rope_scaling": SCALED, "rope_local_base_freq": 2e4},
        ),
        ("llama", {}, {}),
        ("new", {"full_attention": {"rope_theta": 1e6}, "compressed_attention": {"rope_theta": 1e4}}, None),
        ("new", {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4, **SCALED}}, None),
    ],
)
def test_earlier_names(model_type: str, parameters: dict[str, Any], earlier: dict[str, Any] | None) -> None:
    assert earlier_rope(model_type, parameters) == earlier


@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 1e5}, {"rope_theta": 5e5, **SCALED}])
def test_the_folder_has_both_forms_and_computes_as_before(tmp_path: Path, rope: dict[str, Any]) -> None:
    tokenizer = train_tokenizer(["what colour is the sky? the sky is blue."] * 4, 280)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=256, rope_parameters=dict(rope), **sizes)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    before, ids = AutoModelForCausalLM.from_pretrained(tmp_path), torch.arange(1, 60)[None]
    assert write_earlier_names(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == rope["rope_theta"]
    assert ("rope_scaling" in written) == ("factor" in rope)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"
    after, again = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    with torch.inference_mode():
        assert torch.equal(before(ids).logits, after(ids).logits)
    assert again.all_special_tokens == tokenizer.all_special_tokens
    text = "what<|user|> colour<|assistant|>"
    assert again.encode(text) == tokenizer.encode(text)
