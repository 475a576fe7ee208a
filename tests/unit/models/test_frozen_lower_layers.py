"""Layers below all adapters are computed once for policy and reference, and no bit changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from unit.models.adapted import IDS, needs_peft
from unit.models.test_lower_layers import llama, qwen2

from rlhf_core.config.model import LoraConfig
from rlhf_core.models.adapters import FrozenLowerLayers, WithoutAdapters, add_adapters, decoder_layers

pytestmark = needs_peft


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
@pytest.mark.parametrize("make", [llama, qwen2])
def test_the_reference_is_the_same_bits_without_its_lower_layers(make: Callable[[], PreTrainedModel]) -> None:
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
        assert torch.equal(model(input_ids=IDS).logits, expected[0]), "the layers compute again afterwards"
    assert not any("forward" in vars(module) for module in model.modules())


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


def test_layers_that_read_those_below_are_computed_twice() -> None:
    model = adapted(qwen2, 1)
    model.config.num_kv_shared_layers = 1
    counts = counted_layers(model)
    both(model, WithoutAdapters(model))
    assert set(counts.values()) == {2}


def test_a_pass_that_fails_leaves_the_layers_as_they_were() -> None:
    model = adapted(qwen2, 1)
    shared = FrozenLowerLayers.shared_by(model, WithoutAdapters(model))
    with torch.inference_mode():
        with shared.recorded():
            expected = model(input_ids=IDS).logits
        with pytest.raises(RuntimeError, match="broken"), shared.replayed():
            raise RuntimeError("broken")
        assert torch.equal(model(input_ids=IDS).logits, expected)
