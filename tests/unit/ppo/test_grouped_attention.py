"""Grouped attention while decoding: the same numbers, only where it helps, and nothing left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rlhf_core.sampling import decoding as module
from rlhf_core.sampling.decoding import CPU_NAME, decoding_attention, decoding_layers, grouped_attention
from rlhf_core.sampling.distribution import Sampling, philox_uniforms
from rlhf_core.sampling.generation import Rollout, generate

STEPS = 12
SAMPLING = Sampling(eos_id=1, pad_id=0, max_new_tokens=STEPS, min_new_tokens=STEPS)


def build(dtype: torch.dtype, kv_heads: int = 2) -> PreTrainedModel:
    """A random Llama with six query heads."""
    shape = LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=kv_heads,
    )
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(shape, dtype=dtype, attn_implementation="sdpa").eval()
    return model


def sample(model: PreTrainedModel, prompts: list[list[int]]) -> Rollout:
    return generate(model, prompts, philox_uniforms(5, range(len(prompts)), STEPS), SAMPLING)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the queries that pass the kernel grouped."""
    shapes: list[tuple[int, ...]] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def counted(query: torch.Tensor, *rest: Any, **settings: Any) -> torch.Tensor:
        shapes.append(tuple(query.shape))
        return attend(query, *rest, **settings)

    monkeypatch.setattr(module.nn.functional, "scaled_dot_product_attention", counted)
    return shapes


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
def test_attention_by_hand_and_by_transformers(kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(3, 6, 1, 4, generator=generator)
    key, value = torch.randn(2, 3, kv_heads, 7, 4, generator=generator)
    layer = torch.nn.Module()
    layer.num_key_value_groups = 6 // kv_heads  # type: ignore[assignment]
    computed, _ = grouped_attention(layer, query, key, value, None, scaling=0.3)
    expected, _ = sdpa_attention_forward(layer, query, key, value, None, scaling=0.3)
    torch.testing.assert_close(computed, expected)
    head = 5
    weights = torch.softmax(0.3 * key[2, head * kv_heads // 6] @ query[2, head, 0], dim=0)
    torch.testing.assert_close(computed[2, 0, head], weights @ value[2, head * kv_heads // 6])


def test_one_token_without_mask_is_grouped_in_low_precision(calls: list[tuple[int, ...]]) -> None:
    model, prompts = build(torch.bfloat16), [[5, 6, 7], [8, 9, 10]]
    plain = sample(model, prompts)
    calls.clear()
    with decoding_layers(model, 1, STEPS):
        grouped = sample(model, prompts)
    assert calls.count((2, 2, 3, 8)) == 2 * (STEPS - 1), "two layers, all tokens but the first"
    # Log-probabilities in bfloat16 round at the third digit; where no other token was drawn they are the same.
    same = (plain.tokens == grouped.tokens)[:, 3:].long().cumprod(dim=1).bool()
    assert same[:, 0].all()
    torch.testing.assert_close(grouped.logprobs[same], plain.logprobs[same], atol=0.05, rtol=0.02)


@pytest.mark.parametrize(
    ("dtype", "kv_heads", "prompts"),
    [
        (torch.float32, 2, [[5, 6, 7], [8, 9, 10]]),
        (torch.bfloat16, 6, [[5, 6, 7], [8, 9, 10]]),
        (torch.bfloat16, 2, [[5, 6, 7], [8]]),
    ],
    ids=["float32", "a key for each query", "padding"],
)
def test_elsewhere_no_bit_changes(dtype: torch.dtype, kv_heads: int, prompts: list[list[int]]) -> None:
    model = build(dtype, kv_heads)
    plain = sample(model, prompts)
    with decoding_attention(model):
        inside = sample(model, prompts)
    assert torch.equal(plain.tokens, inside.tokens) and torch.equal(plain.logprobs, inside.logprobs)


def test_the_model_attends_as_before_afterwards() -> None:
    model = build(torch.bfloat16)
    with pytest.raises(ZeroDivisionError), decoding_layers(model, 1, STEPS):
        assert model.config._attn_implementation == CPU_NAME
        1 / 0  # noqa: B018
    assert model.config._attn_implementation == "sdpa"


def test_models_that_attend_otherwise_stay_as_they_are() -> None:
    model = build(torch.bfloat16)
    model.config._attn_implementation = "eager"
    with decoding_attention(model):
        assert model.config._attn_implementation == "eager"
    assert model.config._attn_implementation == "eager"
