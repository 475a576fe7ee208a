"""Scalar models on the lower layers of a language model, and lower layers that policy and reference
compute once.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from unit.models.adapted import IDS, needs_peft
from unit.ppo.tiny import make_tiny

from rlhf_core.config.model import LoraConfig
from rlhf_core.config.reward import RewardConfig
from rlhf_core.errors import ModelError
from rlhf_core.models.adapters import (
    FrozenLowerLayers,
    WithoutAdapters,
    add_adapters,
    decoder_layers,
    keep_lower_layers,
)
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


def test_more_layers_than_there_are_is_refused() -> None:
    with pytest.raises(ModelError, match=r"layers is 3, but LlamaForCausalLM has 2 layers"):
        ScalarModel.from_causal_lm(llama(), seed=1, layers=3)


def test_imitation_of_a_model_without_its_upper_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="imitation needs the language model's own last layer"):
        RewardConfig(layers=2)
    assert RewardConfig(layers=2, imitation=0.0).layers == 2


def adapted(make: Callable[[], PreTrainedModel], upper_layers: int | None) -> PreTrainedModel:
    """A model with adapters that change what it computes."""
    model = make()
    add_adapters(model, LoraConfig(rank=2, alpha=4, upper_layers=upper_layers), seed=1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5, generator=torch.Generator().manual_seed(2))
    return model


def counted_layers(model: PreTrainedModel) -> Counter[int]:
    """How often each decoder layer's attention has been computed so far."""
    counts: Counter[int] = Counter()
    layers = decoder_layers(model)
    assert layers is not None
    for number, layer in enumerate(layers):
        attention = next(child for name, child in layer.named_children() if "attn" in name)
        attention.register_forward_hook(lambda *_, number=number: counts.update([number]))
    return counts


def both(model: PreTrainedModel, reference: Any) -> tuple[torch.Tensor, torch.Tensor]:
    shared = FrozenLowerLayers.shared_by(model, reference)
    with torch.inference_mode():
        with shared.recorded():
            policy = model(input_ids=IDS).logits
        with shared.replayed():
            return policy, reference(input_ids=IDS).logits


@pytest.mark.slow
@needs_peft
@pytest.mark.parametrize("make", [llama, qwen2])
def test_the_reference_is_the_same_bits_without_its_lower_layers(
    make: Callable[[], PreTrainedModel],
) -> None:
    model = adapted(make, upper_layers=1)
    reference = WithoutAdapters(model)
    with torch.inference_mode():
        expected = model(input_ids=IDS).logits, reference(input_ids=IDS).logits
    assert not torch.equal(*expected), "or the reference would prove nothing"
    counts, depth = counted_layers(model), model.config.num_hidden_layers
    policy, without = both(model, reference)
    assert torch.equal(policy, expected[0]) and torch.equal(without, expected[1])
    assert counts == dict.fromkeys(range(depth - 1), 1) | {depth - 1: 2}
    with torch.inference_mode():
        assert torch.equal(model(input_ids=IDS).logits, expected[0]), (
            "the layers compute again afterwards"
        )
    assert not any("forward" in vars(module) for module in model.modules())


@needs_peft
def test_nothing_is_shared_where_every_layer_is_adapted_or_the_reference_is_another_model() -> None:
    for model, reference in [
        (every := adapted(qwen2, None), WithoutAdapters(every)),
        (adapted(qwen2, 1), qwen2()),
        (adapted(qwen2, 1), WithoutAdapters(adapted(qwen2, 1))),
    ]:
        with torch.inference_mode():
            expected = model(input_ids=IDS).logits, reference(input_ids=IDS).logits
        counts = counted_layers(model)
        got = both(model, reference)
        assert all(map(torch.equal, got, expected))
        assert set(counts.values()) == ({2} if getattr(reference, "model", None) is model else {1})


@needs_peft
def test_layers_that_read_those_below_are_computed_twice() -> None:
    model = adapted(qwen2, 1)
    model.config.num_kv_shared_layers = 1
    counts = counted_layers(model)
    both(model, WithoutAdapters(model))
    assert set(counts.values()) == {2}


@needs_peft
def test_a_pass_that_fails_leaves_the_layers_as_they_were() -> None:
    model = adapted(qwen2, 1)
    shared = FrozenLowerLayers.shared_by(model, WithoutAdapters(model))
    with torch.inference_mode():
        with shared.recorded():
            expected = model(input_ids=IDS).logits
        with pytest.raises(RuntimeError, match="broken"), shared.replayed():
            raise RuntimeError("broken")
        assert torch.equal(model(input_ids=IDS).logits, expected)
