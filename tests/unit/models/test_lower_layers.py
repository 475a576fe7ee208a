"""Scalar models on the lower layers of a language model."""

from __future__ import annotations

import copy

import pytest
import torch
from architectures import tiny_causal_lm
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from unit.models.adapted import IDS
from unit.ppo.tiny import make_tiny

from rlhf_core.config.reward import RewardConfig
from rlhf_core.errors import ModelError
from rlhf_core.models.architecture import depth_of, keep_lower_layers
from rlhf_core.models.heads import ScalarModel

ONES = torch.ones_like(IDS)


def llama() -> PreTrainedModel:
    return make_tiny().policy


def qwen2() -> PreTrainedModel:
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=32, num_hidden_layers=3, **sizes)).eval()


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=32, n_embd=16, n_layer=3, n_head=2, n_positions=32)
    ).eval()


@pytest.mark.parametrize("make", [llama, qwen2, gpt2])
@torch.no_grad()
def test_the_score_is_read_from_the_lower_layers_of_the_same_model(make: object) -> None:
    lm = make()  # type: ignore[operator]
    whole = copy.deepcopy(lm)
    model = ScalarModel.from_causal_lm(lm, seed=3, layers=2)
    assert (
        len(getattr(lm.base_model, "layers", getattr(lm.base_model, "h", ())))
        == lm.config.num_hidden_layers
    )
    assert model.model.config.num_hidden_layers == 2
    norm = getattr(whole.base_model, "norm", None) or whole.base_model.ln_f
    states = whole.base_model(IDS, output_hidden_states=True).hidden_states
    # The last hidden states of the list have passed the norm already.
    expected = states[2] if whole.config.num_hidden_layers == 2 else norm(states[2])
    assert torch.allclose(model.hidden(IDS, ONES), expected, atol=1e-6)


def test_layers_with_types_of_their_own_keep_the_types_of_the_lower_ones() -> None:
    lm = qwen2()
    keep_lower_layers(lm, 1)
    assert lm.config.layer_types == ["full_attention"]


def test_a_layer_with_two_attentions_is_one_layer() -> None:
    lm = tiny_causal_lm("longcat_flash")
    states = lm.base_model(IDS, output_hidden_states=True).hidden_states
    keep_lower_layers(lm, 1)
    assert depth_of(lm.config) == 1
    below = lm.base_model(IDS, output_hidden_states=True).hidden_states
    assert len(states) == 3 and len(below) == 2 and torch.equal(below[0], states[0])
    with pytest.raises(ModelError, match=r"layers is 2, but LongcatFlashForCausalLM has 1 layers"):
        keep_lower_layers(lm, 2)


def test_more_layers_than_there_are_is_refused() -> None:
    with pytest.raises(ModelError, match=r"layers is 3, but LlamaForCausalLM has 2 layers"):
        ScalarModel.from_causal_lm(llama(), seed=1, layers=3)


def test_imitation_of_a_model_without_its_upper_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="imitation needs the language model's own last layer"):
        RewardConfig(layers=2)
    assert RewardConfig(layers=2, imitation=0.0).layers == 2
