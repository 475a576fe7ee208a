"""4-bit weights: their values and size by hand, gradients through them, and the model that is saved in the end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from unit.models.adapted import NF4, logits, needs_bitsandbytes, train_adapters
from unit.ppo.tiny import make_tiny

from rlhf_core.config.base import BaseConfig
from rlhf_core.config.model import LoraConfig
from rlhf_core.errors import RlhfError
from rlhf_core.models.adapters import NF4Linear, add_adapters, merge_adapters, packed
from rlhf_core.models.causal_lm import load_policy, new_model, save_policy, train_tokenizer

pytestmark = needs_bitsandbytes
# QLoRA (Dettmers et al. 2023), appendix E: the sixteen values of NormalFloat 4.
VALUES = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip


def test_values_are_rounded_to_the_nearest_of_sixteen_and_take_four_bits() -> None:
    exact = torch.tensor(VALUES).repeat(4, 4)  # 4 x 64: each row is one block whose largest value is 1
    stored = packed(exact * 3)
    assert stored.codes.dtype == torch.uint8 and stored.codes.numel() == 4 * 64 // 2
    assert torch.allclose(stored.unpacked(), exact * 3, atol=1e-6)
    # Halfway between two values is the border: .6428 lies between .5626 and .7230.
    off = exact.clone()
    off[:, 13] = 0.64
    assert torch.allclose(packed(off).unpacked()[:, 13], torch.full((4,), VALUES[13]), atol=1e-6)
    off[:, 13] = 0.65
    assert torch.allclose(packed(off).unpacked()[:, 13], torch.full((4,), VALUES[14]), atol=1e-6)


@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_layer_computes_and_differentiates_like_its_plain_one(bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(48, 80, bias=bias).requires_grad_(False)
    four = NF4Linear(layer)
    plain = four.unpacked()
    assert type(plain) is nn.Linear and not torch.equal(plain.weight, layer.weight)
    # The widest gap, from -1 to -.696, has its border .152 of a block's scale from either side; scales are rounded too.
    assert float((plain.weight - layer.weight).abs().max()) < 0.2 * float(layer.weight.abs().max())
    x = torch.randn(5, 3, 48, requires_grad=True)
    y = x.detach().clone().requires_grad_(True)
    four(x).square().sum().backward()
    plain(y).square().sum().backward()
    assert torch.equal(four(x), plain(y)) and torch.allclose(x.grad, y.grad, atol=1e-5)  # type: ignore[arg-type]
    assert [name for name, _ in four.named_parameters()] == (["bias"] if bias else [])


def test_adapters_on_packed_weights_are_trained_and_merged_into_whole_ones() -> None:
    tiny = make_tiny()
    before, names = logits(tiny.policy), [name for name, _ in tiny.policy.named_parameters()]
    add_adapters(tiny.policy, NF4, seed=1)
    rounded = logits(tiny.policy)
    assert not torch.equal(rounded, before)
    assert sum(isinstance(module, NF4Linear) for module in tiny.policy.modules()) == 2 * 7
    train_adapters(tiny)
    after = logits(tiny.policy)
    assert not torch.allclose(after, rounded, atol=1e-3)
    merge_adapters(tiny.policy)
    assert torch.allclose(logits(tiny.policy), after, atol=1e-5)
    assert sorted(name for name, _ in tiny.policy.named_parameters()) == sorted(names)
    assert not any(isinstance(module, NF4Linear) for module in tiny.policy.modules())


def test_layers_without_adapters_are_packed_too_and_come_back() -> None:
    critic = make_tiny().critic
    critic.add_adapters(LoraConfig(rank=1, targets=("q_proj",), quantize="nf4"), seed=1)
    assert sum(isinstance(module, NF4Linear) for module in critic.modules()) == 2 * 7
    assert type(critic.model.get_submodule("score")) is nn.Linear
    merge_adapters(critic)
    assert all(type(m) is nn.Linear for n, m in critic.named_modules() if n.endswith("_proj"))


def test_what_is_saved_is_what_was_trained(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["the cat sat on the mat"], 270)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "layers": 1, "heads": 2}
    policy = new_model(BaseConfig(**sizes), tokenizer, seed=1).eval()
    add_adapters(policy, NF4, seed=1)
    expected = logits(policy)
    merge_adapters(policy)
    save_policy(tmp_path / "policy", policy, tokenizer)
    loaded, _ = load_policy(tmp_path / "policy")
    assert torch.allclose(logits(loaded), expected, atol=1e-6)
    assert "quantization_config" not in (tmp_path / "policy" / "config.json").read_text()


def test_a_missing_bitsandbytes_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    with pytest.raises(RlhfError, match=r"pip install 'rlhf-pipeline\[4bit\]'"):
        add_adapters(make_tiny().policy, NF4, seed=1)
