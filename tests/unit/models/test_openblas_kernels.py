"""Products by OpenBLAS: those of a linear layer, forward and backward, whatever kernels it has."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_info
from torch import Tensor, nn
from unit.ppo.tiny import make_tiny

from rlhf_core.api.inputs import evaluating
from rlhf_core.config.base import BaseConfig
from rlhf_core.config.model import LoraConfig, OptimizerConfig
from rlhf_core.models import kernels
from rlhf_core.models.adapters import adapted_layers, add_adapters, is_linear
from rlhf_core.models.architecture import probe_ids
from rlhf_core.models.causal_lm import load_policy, new_model, save_policy, train_tokenizer
from rlhf_core.models.heads import ScalarModel
from rlhf_core.models.kernels import FEWEST_ROWS, OpenBlasLinear, is_plain_linear, use_kernels
from rlhf_core.sampling.decoding import decoding_layers
from rlhf_core.training.engine.base import LocalEngine


@pytest.fixture(autouse=True)
def on_any_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The products are the same on processors, and of numbers of rows, for which they do not
    pay.
    """
    monkeypatch.setattr(kernels, "openblas_pays", lambda: True)
    monkeypatch.setattr(kernels, "FEWEST_ROWS", 1)


def both(inputs: int, outputs: int, bias: bool) -> tuple[nn.Linear, nn.Linear]:
    """A layer in float64, and its OpenBLAS form in float32."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(inputs * 1000 + outputs)
        exact = nn.Linear(inputs, outputs, bias=bias, dtype=torch.float64)
    holder = nn.Sequential(copy.deepcopy(exact).float())
    use_kernels(holder)
    return exact, holder[0]


def results(layer: nn.Linear, x: Tensor, gradient: Tensor) -> list[Tensor]:
    """Output and gradients of the input and all parameters."""
    x = x.to(layer.weight.dtype).detach().requires_grad_()
    output = layer(x)
    output.backward(gradient.to(output.dtype))
    return [output, x.grad, *(parameter.grad for parameter in layer.parameters())]


def products(output: Tensor) -> list[Any]:
    """The products by OpenBLAS that made a tensor, as nodes of its graph."""
    nodes, waiting = [], [output.grad_fn]
    while waiting:
        node = waiting.pop()
        nodes += [node] if node.name() == "_ProductBackward" else []
        waiting += [before for before, _ in node.next_functions if before is not None]
    return nodes


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=3), st.integers(1, 70), st.integers(2, 70),
    st.booleans(), st.booleans(),
)  # fmt: skip
def test_outputs_and_gradients_are_those_of_a_linear_layer(
    shape: list[int], inputs: int, outputs: int, bias: bool, transposed: bool
) -> None:
    exact, layer = both(inputs, outputs, bias)
    generator = torch.Generator().manual_seed(len(shape))
    x, gradient = (torch.randn(*shape, width, generator=generator) for width in (inputs, outputs))
    if transposed and len(shape) > 1:  # inputs and gradients in another order of memory
        x, gradient = (values.transpose(0, 1) for values in (x, gradient))
    assert type(layer) is OpenBlasLinear
    for actual, expected in zip(
        results(layer, x, gradient), results(exact, x, gradient), strict=True
    ):
        assert actual.dtype == torch.float32 and actual.shape == expected.shape
        torch.testing.assert_close(actual.double(), expected, atol=2e-5, rtol=2e-5)


def test_only_the_gradients_that_are_asked_for_are_computed() -> None:
    _, layer = both(8, 4, bias=False)
    x = torch.randn(3, 8)
    output = layer(x)
    assert [saved is None for saved in products(output)[0].saved_tensors] == [False, True]
    output.sum().backward()
    assert layer.weight.grad is not None and x.grad is None
    layer.weight.requires_grad_(False).grad = None
    output = layer(x.requires_grad_())
    assert [saved is None for saved in products(output)[0].saved_tensors] == [True, False], (
        "inputs take memory"
    )
    output.sum().backward()
    assert layer.weight.grad is None and x.grad is not None
    with torch.no_grad():
        assert not layer(x).requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions_keep_their_bits(dtype: torch.dtype) -> None:
    exact, layer = both(16, 8, bias=True)
    plain = exact.to(dtype)
    layer.to(dtype).load_state_dict(plain.state_dict())
    x = torch.randn(5, 16, dtype=dtype)
    assert torch.equal(layer(x), plain(x))


def test_a_model_keeps_its_parameters_names_and_ties() -> None:
    policy = make_tiny().policy
    before = dict(policy.named_parameters())
    policy.tie_weights()
    use_kernels(policy)
    assert [(name, id(p)) for name, p in policy.named_parameters()] == [
        (name, id(p)) for name, p in before.items()
    ]
    assert type(policy.lm_head) is OpenBlasLinear
    copied = copy.deepcopy(policy)
    assert (
        type(copied.lm_head) is OpenBlasLinear
        and copied.lm_head.weight is not policy.lm_head.weight
    )
    score_head: nn.Module = ScalarModel.from_causal_lm(policy, 0).model.get_submodule("score")
    holder = nn.Sequential(score_head)
    use_kernels(holder)
    assert type(holder[0]) is nn.Linear, "a head of one output is no product of matrices"


def test_a_saved_model_comes_back_with_the_layers(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["the cat sat on the mat"], 280)
    shape = BaseConfig(
        vocab_size=280, hidden_size=16, intermediate_size=32, layers=1, heads=2, max_positions=64
    )
    plain = new_model(shape, tokenizer, 1)
    save_policy(tmp_path / "policy", plain, tokenizer)
    policy, _ = load_policy(tmp_path / "policy")
    assert type(plain.lm_head) is nn.Linear and type(policy.lm_head) is OpenBlasLinear
    save_policy(tmp_path / "copy", policy, tokenizer)
    copied, _ = load_policy(tmp_path / "copy")
    ids = torch.arange(12).view(3, 4) + 5
    with torch.no_grad():
        logits = policy(input_ids=ids).logits
        assert torch.equal(copied(input_ids=ids).logits, logits)
        torch.testing.assert_close(logits, plain(input_ids=ids).logits, atol=1e-5, rtol=1e-5)
    ScalarModel.from_causal_lm(tmp_path / "policy", 2).save(tmp_path / "reward", tokenizer)
    scorer = ScalarModel.load(tmp_path / "reward")
    assert type(scorer.model.get_submodule("score")) is nn.Linear
    assert any(type(module) is OpenBlasLinear for module in scorer.modules())


def test_a_saved_model_is_compared_by_the_default_products() -> None:
    """Its rounding by OpenBLAS, which a model in memory may not have, is no difference."""
    assert probe_ids(100).numel() < FEWEST_ROWS


def test_adapters_packing_and_decoding_take_the_layers_for_plain_ones() -> None:
    policy = make_tiny().policy
    use_kernels(policy)
    assert is_plain_linear(policy.lm_head) and is_linear(policy.lm_head)
    add_adapters(policy, LoraConfig(rank=2), seed=0)
    adapted = dict(adapted_layers(policy))
    assert adapted and all(
        type(layer.get_base_layer()) is OpenBlasLinear for layer in adapted.values()
    )
    ids = torch.arange(12).view(3, 4) + 5
    with torch.no_grad():
        expected = policy(input_ids=ids).logits
        with decoding_layers(policy, rows=3, steps=8):
            assert not any("lora_A" in name for name, _ in policy.named_modules())
            torch.testing.assert_close(policy(input_ids=ids).logits, expected, atol=1e-5, rtol=1e-5)
    assert dict(adapted_layers(policy)).keys() == adapted.keys()


def test_few_rows_keep_their_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "FEWEST_ROWS", 64)
    exact, layer = both(96, 40, bias=True)
    few, many = torch.randn(63, 96), torch.randn(64, 96)
    assert torch.equal(layer(few), exact.float()(few))
    assert not products(layer(few)) and len(products(layer(many))) == 1


def test_the_imitation_loss_of_a_reward_model_multiplies_by_openblas_too() -> None:
    scorer = ScalarModel.from_causal_lm(make_tiny().policy, 0)
    hidden = torch.randn(70, scorer.model.config.hidden_size, requires_grad=True)
    logits = scorer.lm_logits(hidden).whole()
    assert len(products(logits)) == 1
    torch.testing.assert_close(logits, hidden @ scorer.unembedding.t(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("amd", "built_for", "pays"),
    [
        (True, "SkylakeX", True),
        (True, "Haswell", False),
        (True, None, False),
        (False, "SkylakeX", False),
    ],
)
def test_where_it_pays(
    amd: bool, built_for: str | None, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(kernels, "is_amd_with_full_avx512", lambda: amd)
    monkeypatch.setattr(kernels, "numpy_kernels", lambda: built_for)
    policy = make_tiny().policy
    use_kernels(policy)
    assert type(policy.lm_head) is (OpenBlasLinear if pays else nn.Linear)


def test_openblas_has_the_threads_of_pytorch() -> None:
    before = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            use_kernels(nn.Sequential(nn.Linear(4, 4)))
            libraries = [
                library for library in threadpool_info() if library["internal_api"] == "openblas"
            ]
            assert {library["num_threads"] for library in libraries} == {count}
    finally:
        torch.set_num_threads(before)


def test_a_model_that_another_thread_loads_changes_no_product() -> None:
    _, layer = both(8, 4, bias=True)
    x = torch.randn(70, 8)
    expected = layer(x)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)  # as from_pretrained does for the whole process
        assert torch.equal(layer(x), expected)
        with torch.device("meta"):
            assert torch.equal(layer(x), expected)
    finally:
        torch.set_default_dtype(before)


def test_products_that_are_not_finite_pass_in_silence() -> None:
    _, layer = both(8, 4, bias=False)
    x = torch.full((3, 8), float("inf"))
    x[0, 0] = float("nan")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not layer(x).isfinite().any()


def test_hooks_and_second_names_of_a_layer_stay() -> None:
    layer = nn.Linear(4, 3)
    calls: list[str] = []
    layer.register_forward_hook(lambda *_: calls.append("forward"))
    model = nn.ModuleDict({"one": layer, "two": layer})
    use_kernels(model)
    assert type(model["one"]) is OpenBlasLinear and model["two"] is model["one"]
    model["two"](torch.randn(2, 4))
    assert calls == ["forward"]
    bare = nn.Linear(4, 3)
    use_kernels(bare)
    assert type(bare) is OpenBlasLinear


def test_a_callers_model_is_trained_and_read_by_openblas() -> None:
    """Loading has given the layers of models from folders their form; those in memory may come from
    elsewhere.
    """
    model = make_tiny().policy
    with evaluating(model):
        twin = copy.deepcopy(model)
        assert type(model.lm_head) is type(twin.lm_head) is OpenBlasLinear
    assert type(model.lm_head) is nn.Linear
    LocalEngine(model, OptimizerConfig(lr=1e-3), 1)
    assert type(model.lm_head) is OpenBlasLinear


def test_automatic_casts_are_those_of_pytorch() -> None:
    exact, layer = both(8, 4, bias=True)
    x = torch.randn(5, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer(x), exact.float()(x)) and layer(x).dtype == torch.bfloat16
