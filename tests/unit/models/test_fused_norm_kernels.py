"""Norms are fused that compute a root mean square; on the CPU nothing changes, in copies and in
files neither.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from architectures import tiny_causal_lm
from safetensors.torch import save_file
from torch.nn import functional
from transformers import AutoModelForCausalLM
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from rlhf_core.api.inputs import evaluating
from rlhf_core.errors import ModelError
from rlhf_core.models.io import require_same
from rlhf_core.models.kernels import FusedNorm, kernels_inside, use_kernels

IDS = torch.arange(12).view(2, 6) + 4


def fused_in(model: torch.nn.Module) -> int:
    return sum(isinstance(module, FusedNorm) for module in model.modules())


@pytest.mark.parametrize(
    ("name", "norms"),
    [
        ("llama", 5),
        ("qwen2", 5),
        ("qwen3", 9),
        ("olmo2", 9),
        ("gemma", 0),
        ("gemma2", 0),
        ("gpt2", 0),
        ("gemma4_text", 16),
    ],
)
def test_which_norms_are_fused(name: str, norms: int) -> None:
    model = tiny_causal_lm(name)
    names, before = list(model.state_dict()), model(IDS).logits
    use_kernels(model)
    use_kernels(model)
    assert fused_in(model) == norms, (
        "Gemma's add 1 to the weight, GPT-2's take the mean from the input"
    )
    assert list(model.state_dict()) == names
    assert torch.equal(model(IDS).logits, before)


def test_a_norm_of_ones_that_adds_one_to_its_weight_is_told_apart() -> None:
    model = tiny_causal_lm("gemma")
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            torch.nn.init.zeros_(module.weight)
    use_kernels(model)
    assert not fused_in(model)


def test_copies_are_fused_too() -> None:
    model = tiny_causal_lm("llama")
    use_kernels(model)
    twin = copy.deepcopy(model)
    assert fused_in(twin) == 5 and torch.equal(twin(IDS).logits, model(IDS).logits)
    assert not {id(one) for one in twin.parameters()} & {id(one) for one in model.parameters()}


def test_a_pickle_names_the_librarys_class_of_a_norm() -> None:
    model = tiny_causal_lm("llama")
    use_kernels(model)
    written = pickle.dumps(model)
    assert b"LlamaRMSNorm" in written and b"FusedLlama" not in written, (
        "no module has a class of that name"
    )


def test_models_without_weights_are_fused_by_their_class() -> None:
    with torch.device("meta"):
        model = tiny_causal_lm("llama")
    use_kernels(model)
    assert fused_in(model) == 5


class ScaledRMSNorm(torch.nn.Module):
    """A norm whose weight has any shape, and which scales by a gate where it gets one."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(shape)), 1e-6

    def forward(self, hidden: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        normed = self.weight * hidden * (hidden.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return normed if gate is None else gate * normed


class OutsideRMSNorm(ScaledRMSNorm):
    """Adds epsilon to the root."""

    def forward(self, hidden: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return self.weight * hidden / (hidden.square().mean(-1, keepdim=True).sqrt() + self.eps)


def emptied(norm: torch.nn.Module) -> torch.nn.Module:
    """Its weight as ZeRO 3 leaves it."""
    norm.weight.data = torch.empty(0)
    return norm


def exchanged(norm: torch.nn.Module) -> torch.nn.Module:
    norm.forward = lambda hidden: 2 * hidden  # type: ignore[method-assign]
    return norm


OTHER: dict[str, Callable[[], torch.nn.Module]] = {
    "no weight": lambda: Gemma4RMSNorm(8, with_scale=False),
    "spread over GPUs": lambda: emptied(GemmaRMSNorm(8)),
    "a weight of each head": lambda: ScaledRMSNorm(2, 8),
    "epsilon outside of the root": lambda: OutsideRMSNorm(8),
    "exchanged by a hook": lambda: exchanged(LlamaRMSNorm(8)),
}


@pytest.mark.parametrize("other_first", [False, True])
@pytest.mark.parametrize("name", OTHER)
def test_norms_that_compute_something_else_stay_and_change_nothing_for_others(
    name: str, other_first: bool
) -> None:
    other, hidden = OTHER[name](), torch.randn(2, 2, 8)
    same = {"no weight": Gemma4RMSNorm, "exchanged by a hook": LlamaRMSNorm}.get(
        name, ScaledRMSNorm
    )(8)
    expected = None if name == "spread over GPUs" else other(hidden)
    for norm in (other, same) if other_first else (same, other):
        use_kernels(norm)
    assert (fused_in(other), fused_in(same)) == (0, 1)
    assert expected is None or torch.equal(other(hidden), expected)


def test_a_norm_takes_its_other_arguments_and_its_hooks_see_no_trial() -> None:
    norm, seen = ScaledRMSNorm(8), list[torch.Tensor]()
    norm.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    hidden, gate = torch.randn(2, 3, 8)
    expected = norm(hidden, gate), norm(hidden)
    seen.clear()
    use_kernels(norm)
    assert fused_in(norm) and not seen
    assert torch.equal(norm(hidden, gate=gate), expected[0]) and torch.equal(
        norm(hidden), expected[1]
    )


EXPORTED: dict[str, Callable[..., Callable[..., torch.Tensor]]] = {
    "exported": lambda norm, hidden: torch.export.export(norm, (hidden,), strict=False).module(),
    "exported strictly": lambda norm, hidden: torch.export.export(
        norm, (hidden,), strict=True
    ).module(),
    "compiled": lambda norm, hidden: torch.compile(norm, backend="aot_eager", fullgraph=True),
}


@pytest.mark.parametrize("name", EXPORTED)
def test_a_trained_model_can_be_exported_and_compiled(name: str) -> None:
    norm, hidden = tiny_causal_lm("llama").model.norm, torch.randn(2, 3, 32)
    use_kernels(norm)
    assert torch.allclose(EXPORTED[name](norm, hidden)(hidden), norm(hidden))


@pytest.mark.parametrize("block", [kernels_inside, evaluating])
def test_a_callers_model_gets_its_own_norms_back(
    block: Callable[..., AbstractContextManager[None]],
) -> None:
    model = tiny_causal_lm("llama")
    with block(model):
        twin = copy.deepcopy(model)
        with block(model):
            assert fused_in(model) == fused_in(twin) == 5
        assert fused_in(model) == 5
    assert not fused_in(model) and fused_in(twin) == 5


def test_a_norm_that_was_exchanged_is_not_saved_as_the_configurations(tmp_path: Path) -> None:
    model = tiny_causal_lm("gemma", tie_word_embeddings=False)
    model.model.norm = LlamaRMSNorm(32)
    use_kernels(model)
    model.config.save_pretrained(tmp_path)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(ModelError):
        require_same(tmp_path, tmp_path, model, AutoModelForCausalLM, lambda own: own(IDS).logits)


def test_the_kernel_is_the_formula() -> None:
    hidden, weight = torch.tensor([[3.0, 4.0]]), torch.tensor([2.0, 0.5])
    expected = torch.tensor([[6.0, 2.0]]) / 12.5**0.5
    assert torch.allclose(functional.rms_norm(hidden, (2,), weight, 0.0), expected)
