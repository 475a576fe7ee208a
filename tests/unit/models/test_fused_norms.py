"""Norms are fused that compute a root mean square; on the CPU nothing changes, in copies and in files neither."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from architectures import tiny_causal_lm
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from rlhf_core.models.fused_norms import FusedNorm, fuse_norms

IDS = torch.arange(12).view(2, 6) + 4


def fused_in(model: torch.nn.Module) -> int:
    return sum(isinstance(module, FusedNorm) for module in model.modules())


@pytest.mark.parametrize(
    ("name", "norms"),
    [("llama", 5), ("mistral", 5), ("qwen2", 5), ("qwen3", 9), ("olmo2", 9), ("gemma", 0), ("gemma2", 0), ("gpt2", 0)],
)
def test_which_norms_are_fused(name: str, norms: int) -> None:
    model = tiny_causal_lm(name)
    names, before = list(model.state_dict()), model(IDS).logits
    fuse_norms(model)
    fuse_norms(model)
    assert fused_in(model) == norms, "Gemma's add 1 to the weight, GPT-2's take the mean from the input"
    assert list(model.state_dict()) == names
    assert torch.equal(model(IDS).logits, before)


def test_a_norm_of_ones_that_adds_one_to_its_weight_is_told_apart() -> None:
    model = tiny_causal_lm("gemma")
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            torch.nn.init.zeros_(module.weight)
    fuse_norms(model)
    assert not fused_in(model)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])  # noqa: S301
def test_copies_are_fused_too(copied: object) -> None:
    model = tiny_causal_lm("llama")
    fuse_norms(model)
    twin = copied(model)  # type: ignore[operator]
    assert fused_in(twin) == 5 and torch.equal(twin(IDS).logits, model(IDS).logits)
    assert not {id(one) for one in twin.parameters()} & {id(one) for one in model.parameters()}


def test_models_without_weights_are_fused_by_their_class() -> None:
    with torch.device("meta"):
        model = tiny_causal_lm("llama")
    fuse_norms(model)
    assert fused_in(model) == 5


@pytest.mark.parametrize("frozen", [False, True])
def test_on_shapes_alone_a_norm_keeps_its_input_and_a_number_of_each_position(frozen: bool) -> None:
    norm = tiny_causal_lm("llama").bfloat16().model.norm.requires_grad_(not frozen)
    fuse_norms(norm)
    kept = list[torch.Tensor]()
    with FakeTensorMode(allow_non_fake_inputs=True):
        norm.weight = torch.nn.Parameter(torch.empty(32, dtype=torch.bfloat16), requires_grad=not frozen)
        hidden = torch.empty(2, 6, 32, dtype=torch.bfloat16, requires_grad=True)

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = norm(hidden)
        output.sum().backward()
    assert [tuple(each.shape) for each in kept] == [(2, 6, 32), (32,), (2, 6)]
    assert sum(each.nbytes for each in kept) == 2 * 6 * 32 * 2 + 32 * 2 + 2 * 6 * 4
    assert output.dtype == torch.bfloat16 and hidden.grad is not None and hidden.grad.shape == hidden.shape
    assert (norm.weight.grad is None) == frozen


def test_the_kernel_is_the_formula() -> None:
    hidden, weight = torch.tensor([[3.0, 4.0]]), torch.tensor([2.0, 0.5])
    expected = torch.tensor([[6.0, 2.0]]) / 12.5**0.5
    assert torch.allclose(functional.rms_norm(hidden, (2,), weight, 0.0), expected)
