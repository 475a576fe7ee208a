"""The roofline of passes, by numbers computed by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from rlhf_extras.memory import roofline
from rlhf_extras.memory.architecture import Architecture
from rlhf_extras.memory.roofline import Device, ModelCost, Roofline
from rlhf_extras.memory.workload import Work

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
TINY = Architecture.of({"model_type": "llama", **SIZES}, "tiny")
# 3 layers of q and o (32 x 32), k and v (32 x 16) and three of 32 x 48.
LINEAR = 3 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48)
MODEL = ModelCost(linear=1000, layers=2, width=10, head=500, cache_bytes=8, weight_bytes=6000)
# One forward pass: 4 rows of 2 * 1000 * 5 products in layers and 2 * 2 * 10 * 5^2 in attention.
LAYERS = 4 * (10_000 + 1_000)
LOGITS = 4 * 2 * 500 * 2  # of the 2 tokens of each reply


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model costs what MODEL does."""
    monkeypatch.setattr(roofline, "_model_cost", lambda architecture, precision: MODEL)


def test_a_models_costs_are_those_of_its_config() -> None:
    model = ModelCost.of(TINY, "bfloat16")
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
    causal = ModelCost.of(TINY, "float32").forward(rows=2, length=16, scored=16)
    assert counter.get_total_flops() - rotary == causal + 2 * 3 * 2 * 32 * 16**2


@pytest.mark.parametrize("chosen", [1, 3])
def test_a_token_passes_the_experts_that_its_router_chooses(chosen: int) -> None:
    sizes = SIZES | {"num_local_experts": 5, "num_experts_per_tok": chosen}
    mixtral = Architecture.of({"model_type": "mixtral", **sizes}, "tiny")
    model = ModelCost.of(mixtral, "bfloat16")
    attention, expert = 3 * (2 * 32 * 32 + 2 * 32 * 16), 3 * (3 * 32 * 48)
    assert model.linear == attention + chosen * expert
    assert model.idle == (5 - chosen) * expert
    assert model.weight_bytes == 2 * (attention + 5 * expert + 32 * 96)
    net = AutoModelForCausalLM.from_config(
        MixtralConfig(**sizes), attn_implementation="eager", experts_implementation="eager"
    )
    with FlopCounterMode(display=False) as counter:
        net(torch.zeros(2, 16, dtype=torch.long))
    rotary = counter.get_flop_counts()["Global"].get(torch.ops.aten.bmm, 0) - 2 * 3 * 4 * 32 * 16**2
    routers = 2 * 3 * 5 * 32 * 2 * 16
    causal = model.forward(rows=2, length=16, scored=16)
    assert counter.get_total_flops() - rotary - routers == causal + 2 * 3 * 2 * 32 * 16**2


@pytest.mark.usefixtures("costs")
def test_flops_of_each_kind_of_pass() -> None:
    plain, recomputed = Roofline(TINY, "float32"), Roofline(TINY, "float32", recomputed=True)
    read = Work("forward", "read", 4, 3, 2, times=7)
    assert plain.flops(read) == 7 * (LAYERS + LOGITS) == recomputed.flops(read)
    assert plain.flops(Work("rewards", "read", 4, 5, 0, scalar=True)) == LAYERS
    update = Work("update", "train", 4, 3, 2)
    assert plain.flops(update) == 3 * (LAYERS + LOGITS)
    assert recomputed.flops(update) == 4 * (LAYERS + LOGITS)
    adapters = Work("update", "train", 4, 3, 2, adapters=True)
    assert recomputed.flops(adapters) == 3 * (LAYERS + LOGITS)
    texts = Work("update", "train", 4, 0, 5)  # with logits everywhere
    assert plain.flops(texts) == 3 * (LAYERS + 4 * 2 * 500 * 5)


@pytest.mark.usefixtures("costs")
def test_ranks_divide_the_rows_and_the_busiest_counts() -> None:
    three = Roofline(TINY, "float32", processes=3)
    work = Work("forward", "read", 4, 3, 2)
    assert three.rows(work) == 2
    assert three.flops(work) == (LAYERS + LOGITS) / 2


@pytest.mark.usefixtures("costs")
def test_generation_is_bound_by_memory_or_by_products() -> None:
    plain, work = Roofline(TINY, "float32"), Work("generation", "sample", 4, 3, 2)
    prompts = 4 * (2 * 1000 * 3 + 2 * 2 * 10 * 9)
    read = sum(6000 + 4 * held * 8 for held in (3, 4))
    slow_memory = Device("slow memory", flops=1e3, bandwidth=1.0)
    assert plain.seconds(work, slow_memory) == pytest.approx(prompts / 1e3 + read)
    products = sum(4 * (2 * 1000 + 2 * 2 * 10 + 2 * 500) + 4 * 4 * 2 * 10 * held for held in (3, 4))
    slow_products = Device("slow products", flops=1.0, bandwidth=1e9)
    assert plain.seconds(work, slow_products) == pytest.approx(prompts + products)
