"""The roofline of a PPO iteration, and what follows from it for several GPUs, by numbers computed by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.ppo_throughput.__main__ import shares
from benchmarks.ppo_throughput.roofline import Device, Iteration, Model
from benchmarks.ppo_throughput.scaling import Traffic, predict
from benchmarks.ppo_throughput.trainer import Times
from rlhf_core.config.loading import check_params
from rlhf_core.memory.architecture import Architecture

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
TINY = Architecture.of({"model_type": "llama", **SIZES}, "tiny")
# 3 layers of q and o (32 x 32), k and v (32 x 16) and three of 32 x 48.
LINEAR = 3 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48)
MODEL = Model(linear=1000, layers=2, width=10, head=500, cache_bytes=8, weight_bytes=6000)
ITERATION = Iteration(
    policy=MODEL, critic=MODEL, reward=MODEL, referee=MODEL, rows=4, prompt=3, reply=2, epochs=1, referee_every=2,
    ptx_tokens=0, adapters=False, critic_adapters=False, recomputed=False,
)  # fmt: skip


def test_a_models_costs_are_those_of_its_config() -> None:
    model = Model.of(TINY, "bfloat16")
    assert (model.linear, model.layers, model.width, model.head) == (LINEAR, 3, 32, 32 * 96)
    assert model.cache_bytes == 2 * 3 * 2 * 8 * 2  # keys and values of 3 layers, 2 heads of 8, 2 bytes
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
    assert ITERATION.reward_flops() == layers
    assert ITERATION.referee_flops() == layers / 2
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


def test_what_was_measured_is_predicted_for_the_same_recipe() -> None:
    device = Device("a device", flops=1e6, bandwidth=1e5)
    times = Times(2.0, {"generation": 0.7, "forward": 0.4, "rewards": 0.1, "update": 0.6}, None)
    found = shares(ITERATION, device, times)
    nothing = Traffic(0.0, 0.0, 0.0, 0.0)
    again = predict(ITERATION, nothing, device, found["roofline_shares"], found["host_seconds_per_reply"], link=1.0)
    assert sum(again.computing.values()) == pytest.approx(2.0)
    assert again.slowest == again.fastest == pytest.approx(20 / 2.0)


def test_phases_that_send_while_they_compute_take_the_longer_of_both() -> None:
    device = Device("a device", flops=1e6, bandwidth=1e5)
    full = dict.fromkeys(("generation", "forward", "rewards", "update"), 1.0)
    found = predict(ITERATION, Traffic(0.0, 0.0, 0.0, update=50.0), device, full, host=0.0, link=10.0)
    computing = sum(found.computing.values())
    assert found.slowest == pytest.approx(20 / (computing + 5.0))
    assert found.fastest == pytest.approx(20 / (computing - found.computing["update"] + 5.0))


@pytest.mark.parametrize(
    ("launch", "tensors"),
    [
        ({"engine": "local"}, 2 * 2),  # all-reduce of gradients, twice their size, in each of two steps
        ({"engine": "deepspeed", "zero": 1}, 2 * 2),
        ({"engine": "deepspeed", "zero": 2}, 4 + 2),  # a reduction for each of two micro-batches of a step
        ({"engine": "deepspeed", "zero": 3}, 3 * 4),
    ],
)
def test_bytes_of_an_update(launch: dict[str, Any], tensors: int) -> None:
    ppo = {"batch_size": 32, "minibatches": 2, "micro_batch_size": 2, "max_new_tokens": 2}
    params = check_params(
        {"base": {"dtype": "bfloat16"}, "ppo": ppo, "compute": {"launch": {"ppo": {"processes": 4, **launch}}}}
    )
    iteration = dataclasses.replace(ITERATION, rows=8)
    of_both_models = 2 * 0.75 * 2 * 1500  # three quarters of 1500 parameters of 2 bytes
    assert Traffic.of(params, iteration, gpus=4) == Traffic(0.0, 0.0, 0.0, tensors * of_both_models)


def test_bytes_of_sharded_frozen_models() -> None:
    launch = {"engine": "deepspeed", "zero": 2, "processes": 4, "frozen": "sharded"}
    params = check_params({"ppo": {"batch_size": 32, "micro_batch_size": 2}, "compute": {"launch": {"ppo": launch}}})
    traffic = Traffic.of(params, dataclasses.replace(ITERATION, rows=8, adapters=True), gpus=4)
    once = 0.75 * 4 * 1500
    # Under adapters the reference is the policy; the referee is asked every second iteration.
    assert (traffic.forward, traffic.rewards, traffic.referee) == (0.0, 4 * once, 2 * once)
