"""Packed layers: one product for layers of the same input, whatever order and thread they are called in."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

from rlhf_core.sampling import decoding as layers
from rlhf_core.sampling.decoding import FusedProjection, PackedLinear, decoding_layers

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this build of PyTorch has no packed products"
)
ROWS = 6


@pytest.fixture
def plain() -> list[nn.Linear]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return [nn.Linear(16, 24), nn.Linear(16, 8, bias=False), nn.Linear(16, 8)]


@pytest.fixture
def packed(plain: list[nn.Linear]) -> list[PackedLinear]:
    shared = FusedProjection(plain, [layer.weight for layer in plain], ROWS)
    return [PackedLinear(layer, shared, position) for position, layer in enumerate(plain)]


def rows(seed: int) -> Tensor:
    return torch.randn(ROWS, 1, 16, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 1, 0), (0, 2)])
def test_each_layer_gives_its_own_product(plain: list[nn.Linear], packed: list[PackedLinear], order: Any) -> None:
    with torch.inference_mode():
        for seed in range(2):
            input = rows(seed)
            for position in order:
                torch.testing.assert_close(packed[position](input), plain[position](input))


def test_the_result_of_another_input_is_not_taken(plain: list[nn.Linear], packed: list[PackedLinear]) -> None:
    with torch.inference_mode():
        first, second = rows(1), rows(2)
        packed[0](first)
        torch.testing.assert_close(packed[1](second), plain[1](second))
        torch.testing.assert_close(packed[2](first), plain[2](first))


def test_no_result_is_kept_once_the_last_layer_has_it(packed: list[PackedLinear]) -> None:
    with torch.inference_mode():
        input = rows(1)
        for layer, kept in zip(packed, (True, True, False), strict=True):
            layer(input)
            assert (layer.shared._last.held is not None) == kept


def test_threads_do_not_take_the_results_of_each_other(plain: list[nn.Linear], packed: list[PackedLinear]) -> None:
    barrier = Barrier(2, timeout=60)

    def compute(seed: int) -> bool:
        right = True
        with torch.inference_mode():
            for turn in range(20):
                input = rows(100 * seed + turn)
                for position in range(3):
                    barrier.wait()
                    right &= torch.allclose(packed[position](input), plain[position](input), atol=1e-6)
        return right

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(compute, (1, 2)))


@pytest.mark.parametrize(("heads", "products"), [(4, 4), (2, 4)])
def test_a_block_of_llama_is_four_products(heads: int, products: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = LlamaConfig(
        vocab_size=29, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=heads, pad_token_id=0,
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    monkeypatch.setattr(layers, "PACKED_PARAMETERS", 0)
    calls: list[int] = []
    product = FusedProjection.product

    def counted(self: FusedProjection, input: Tensor, position: int) -> Tensor:
        held = getattr(self._last, "held", None)
        calls.append(held is None or held[0] is not input)
        return product(self, input, position)

    monkeypatch.setattr(FusedProjection, "product", counted)
    ids = torch.arange(4, 28).view(2, 12)
    with torch.inference_mode():
        expected = model(input_ids=ids).logits
        with decoding_layers(model, 8, 40):
            torch.testing.assert_close(model(input_ids=ids).logits, expected, atol=2e-5, rtol=1e-5)
    assert sum(calls) == 2 * products + 1 and len(calls) == 2 * 7 + 1
