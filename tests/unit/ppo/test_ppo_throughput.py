"""The roofline of a PPO iteration, by numbers computed by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.ppo_throughput.roofline import Device, Iteration, Model
from rlhf_extras.memory.architecture import Architecture

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
TINY = Architecture.of({"model_type": "llama", **SIZES}, "tiny")
# 3 layers of q and o (32 x 32), k and v (32 x 16) and three of 32 x 48.
LINEAR = 3 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48)
MODEL = Model(linear=1000, layers=2, width=10, head=500, cache_bytes=8, weight_bytes=6000)
ITERATION = Iteration(
    policy=MODEL, critic=MODEL, reward=MODEL, rows=4, prompt=3, reply=2, epochs=1,
    ptx_tokens=0, adapters=False, critic_adapters=False, recomputed=False,
)  # fmt: skip


def test_a_models_costs_are_those_of_its_config() -> None:
    model = Model.of(TINY, "bfloat16")
    assert (model.linear, model.layers, model.width, model.head) == (LINEAR, 3, 32, 32 * 96)
    assert (
        model.cache_bytes == 2 * 3 * 2 * 8 * 2
    )  # keys and values of 3 layers, 2 heads of 8, 2 bytes
    assert model.weight_bytes == 2 * (LINEAR + 32 * 96)


def test_a_forward_pass_has_the_products_that_torch_counts() -> None:
    # Eager attention computes both halves of the causal square, of which the roofline counts one.
    net = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES), attn_implementation="eager")
    with FlopCounterMode(display=False) as counter:
        net(torch.zeros(2, 16, dtype=torch.long))
    rotary = counter.get_flop_counts()["Global"].get(torch.ops.aten.bmm, 0) - 2 * 3 * 4 * 32 * 16**2
    causal = Model.of(TINY, "float32").forward(rows=2, length=16, scored=16)
    assert counter.get_total_flops() - rotary == causal + 2 * 3 * 2 * 32 * 16**2


def test_flops_of_each_phase() -> None:
    # One forward pass: 4 rows of 2 * 1000 * 5 products in layers and 2 * 2 * 10 * 5^2 in attention.
    layers = 4 * (10_000 + 1_000)
    logits = 4 * 2 * 500 * 2  # of the 2 tokens of each reply
    assert ITERATION.scoring_flops() == 3 * layers + 2 * logits
    assert (
        dataclasses.replace(ITERATION, scored_every=4).scoring_flops()
        == 2.25 * layers + 1.25 * logits
    )
    assert ITERATION.reward_flops() == layers
    assert ITERATION.update_flops() == 3 * (2 * layers + logits)
    with_adapters = dataclasses.replace(ITERATION, adapters=True, recomputed=True)
    assert with_adapters.update_flops() == 3 * (layers + logits) + 4 * layers
    alone = dataclasses.replace(ITERATION, critic_free=True, ptx_tokens=10)
    assert alone.update_flops() == 3 * (layers + logits + (2 * 11_000 + 10 * 2 * 500))


def test_generation_is_bound_by_memory_or_by_products() -> None:
    prompts = 4 * (2 * 1000 * 3 + 2 * 2 * 10 * 9)
    read = sum(6000 + 4 * held * 8 for held in (3, 4))
    slow_memory = Device("slow memory", flops=1e3, bandwidth=1.0)
    assert ITERATION.generation_seconds(slow_memory) == pytest.approx(prompts / 1e3 + read)
    products = sum(4 * (2 * 1000 + 2 * 2 * 10 + 2 * 500) + 4 * 4 * 2 * 10 * held for held in (3, 4))
    slow_products = Device("slow products", flops=1.0, bandwidth=1e9)
    assert ITERATION.generation_seconds(slow_products) == pytest.approx(prompts + products)
