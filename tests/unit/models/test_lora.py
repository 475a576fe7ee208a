"""Adapters: nothing at first, all that is trained, off for the reference, merged for export; on
4-bit weights too.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from unit.models.adapted import (
    IDS,
    LORA,
    NF4,
    logits,
    needs_bitsandbytes,
    needs_peft,
    train_adapters,
)
from unit.models.test_lower_layers import gpt2, llama
from unit.ppo.tiny import Tiny, make_config, make_tiny, make_trainer

from rlhf_core.config.base import BaseConfig
from rlhf_core.config.model import LoraConfig
from rlhf_core.errors import ModelError, RlhfError
from rlhf_core.models.adapters import (
    NF4Linear,
    WithoutAdapters,
    add_adapters,
    merge_adapters,
    packed,
)
from rlhf_core.models.causal_lm import load_policy, new_model, save_policy, train_tokenizer

EITHER = [LORA, pytest.param(NF4, marks=needs_bitsandbytes, id="nf4")]


@needs_peft
@pytest.mark.parametrize("lora", EITHER)
def test_only_adapters_are_trained_and_the_reference_stays_what_it_was(lora: LoraConfig) -> None:
    tiny = make_tiny()
    exact, names = logits(tiny.policy), {name for name, _ in tiny.policy.named_parameters()}
    add_adapters(tiny.policy, lora, seed=1)
    before, reference = logits(tiny.policy), WithoutAdapters(tiny.policy)
    assert torch.equal(before, exact) == (lora is LORA), "4-bit weights are rounded"
    # Two layers of seven matrices, each with an A and a B.
    packed_layers = [module for module in tiny.policy.modules() if isinstance(module, NF4Linear)]
    assert len(packed_layers) == (0 if lora is LORA else 2 * 7)
    trainable = [name for name, p in tiny.policy.named_parameters() if p.requires_grad]
    assert len(trainable) == 2 * 7 * 2 and all("lora_" in name for name in trainable)
    train_adapters(tiny)
    assert torch.equal(logits(reference), before)
    assert [name for name, p in tiny.policy.named_parameters() if p.requires_grad] == trainable
    after = logits(tiny.policy)
    assert not torch.allclose(after, before, atol=1e-3)
    merge_adapters(tiny.policy)
    assert torch.allclose(logits(tiny.policy), after, atol=1e-5)
    assert {name for name, _ in tiny.policy.named_parameters()} == names
    assert all(p.requires_grad for p in tiny.policy.parameters()) or lora is NF4
    assert not any(isinstance(module, NF4Linear) for module in tiny.policy.modules())


@needs_peft
def test_the_same_seed_gives_the_same_adapters_and_leaves_the_process_alone() -> None:
    found = []
    for _ in range(2):
        tiny = make_tiny()
        state = torch.get_rng_state()
        add_adapters(tiny.policy, LORA, seed=7)
        assert torch.equal(torch.get_rng_state(), state)
        found.append([p.detach() for name, p in tiny.policy.named_parameters() if "lora_A" in name])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@needs_peft
def test_a_scalar_model_trains_adapters_and_head() -> None:
    critic = make_tiny().critic
    critic.add_adapters(LoraConfig(rank=1, targets=("q_proj",)), seed=1)
    trainable = [name for name, p in critic.named_parameters() if p.requires_grad]
    assert sum("lora_" in name for name in trainable) == 4
    assert [name for name in trainable if "lora_" not in name] == ["model.score.weight"]


@pytest.mark.slow
@needs_peft
@pytest.mark.parametrize("lora", EITHER)
def test_ppo_with_adapters_keeps_its_reference_and_resumes_exactly(
    tmp_path: Path, lora: LoraConfig
) -> None:
    def untrained() -> Tiny:
        tiny = make_tiny()
        add_adapters(tiny.policy, lora, seed=3)
        return tiny

    def run(folder: Path, iterations: int) -> Tiny:
        tiny = untrained()
        tiny.reference = WithoutAdapters(tiny.policy)  # type: ignore[assignment]
        trainer = make_trainer(tiny, make_config(), folder)
        object.__setattr__(trainer.config, "iterations", iterations)
        trainer.run()
        assert trainer.history.rows()[0]["kl"] == pytest.approx(0.0, abs=1e-5)
        return tiny

    before = logits(untrained().policy)
    whole = run(tmp_path / "whole", 4)
    assert torch.equal(logits(whole.reference), before)
    assert not torch.equal(logits(whole.policy), before)
    run(tmp_path / "parts", 2)
    assert torch.equal(logits(run(tmp_path / "parts", 4).policy), logits(whole.policy))


@needs_peft
@pytest.mark.parametrize(
    ("make", "lora", "reason"),
    [
        (llama, LoraConfig(targets=("query",)), r"no linear layer query.*q_proj"),
        (
            llama,
            LoraConfig(upper_layers=3),
            r"upper_layers is 3, but LlamaForCausalLM has 2 layers",
        ),
        (gpt2, LORA, "GPT2LMHeadModel has no layers of the class Linear, which lora adapts"),
    ],
)
def test_what_a_model_does_not_have_cannot_be_adapted(
    make: Any, lora: LoraConfig, reason: str
) -> None:
    with pytest.raises(ModelError, match=reason):
        add_adapters(make(), lora, seed=1)


@pytest.mark.parametrize(
    ("package", "lora", "extra"), [("peft", LORA, "lora"), ("bitsandbytes.functional", NF4, "4bit")]
)
def test_a_missing_package_is_one_line(
    package: str, lora: LoraConfig, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lora is NF4:
        pytest.importorskip("bitsandbytes")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(RlhfError, match=rf"pip install 'rlhf-pipeline\[{extra}\]'"):
        add_adapters(make_tiny().policy, lora, seed=1)


@needs_peft
def test_on_a_shared_backbone_adapters_and_the_value_head_are_trained(tmp_path: Path) -> None:
    tiny = make_tiny()
    add_adapters(tiny.policy, LoraConfig(rank=2), seed=1)
    without: Any = WithoutAdapters(tiny.policy)
    tiny.reference = without
    before = {
        name: parameter.detach().clone() for name, parameter in tiny.policy.named_parameters()
    }
    trainer = make_trainer(tiny, make_config(critic_mode="shared", iterations=2), tmp_path)
    head = trainer.learner.pair.critic.score.weight.detach().clone()  # type: ignore[attr-defined]
    trainer.run()
    moved = {
        name
        for name, parameter in tiny.policy.named_parameters()
        if not torch.equal(parameter, before[name])
    }
    assert moved and all("lora_" in name for name in moved)
    assert not torch.equal(trainer.learner.pair.critic.score.weight, head)  # type: ignore[attr-defined]
    assert trainer.history.rows()[-1]["kl"] != 0.0  # the reference has not moved along


@needs_peft
def test_adapters_of_upper_layers_leave_the_lower_ones_without_a_gradient() -> None:
    tiny = make_tiny()
    add_adapters(tiny.policy, LORA.model_copy(update={"upper_layers": 1}), seed=1)
    trainable = [name for name, p in tiny.policy.named_parameters() if p.requires_grad]
    # Of two layers only the one next to the head: seven matrices, each with an A and a B.
    assert len(trainable) == 7 * 2 and all(".layers.1." in name for name in trainable)
    states: list[Tensor] = []
    tiny.policy.model.layers[0].register_forward_hook(
        lambda module, inputs, output: states.append(output)
    )
    tiny.policy(input_ids=IDS).logits.sum().backward()
    assert not states[0].requires_grad


def test_stacked_adapters_reach_the_deeper_of_both() -> None:
    four, six = (LORA.model_copy(update={"upper_layers": depth}) for depth in (4, 6))
    assert four.stacked_with(six) == LoraConfig(rank=4, alpha=4, upper_layers=6)
    assert six.stacked_with(four).upper_layers == 6
    assert four.stacked_with(LORA).upper_layers is None
    queries, values = (
        LORA.model_copy(update={"targets": (name,)}) for name in ("q_proj", "v_proj")
    )
    assert queries.stacked_with(values).targets == ("q_proj", "v_proj")
    assert queries.stacked_with(LORA).targets == ()


# QLoRA (Dettmers et al. 2023), appendix E: the sixteen values of NormalFloat 4.
VALUES = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip


@needs_bitsandbytes
def test_values_are_rounded_to_the_nearest_of_sixteen_and_take_four_bits() -> None:
    exact = torch.tensor(VALUES).repeat(
        4, 4
    )  # 4 x 64: each row is one block whose largest value is 1
    stored = packed(exact * 3)
    assert stored.codes.dtype == torch.uint8 and stored.codes.numel() == 4 * 64 // 2
    assert torch.allclose(stored.unpacked(), exact * 3, atol=1e-6)
    # Halfway between two values is the border: .6428 lies between .5626 and .7230.
    off = exact.clone()
    off[:, 13] = 0.64
    assert torch.allclose(packed(off).unpacked()[:, 13], torch.full((4,), VALUES[13]), atol=1e-6)
    off[:, 13] = 0.65
    assert torch.allclose(packed(off).unpacked()[:, 13], torch.full((4,), VALUES[14]), atol=1e-6)


@needs_bitsandbytes
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_layer_computes_and_differentiates_like_its_plain_one(bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(48, 80, bias=bias).requires_grad_(False)
    four = NF4Linear(layer)
    plain = four.unpacked()
    assert type(plain) is nn.Linear and not torch.equal(plain.weight, layer.weight)
    # The widest gap, from -1 to -.696, has its border .152 of a block's scale from either side;
    # scales are rounded too.
    assert float((plain.weight - layer.weight).abs().max()) < 0.2 * float(layer.weight.abs().max())
    x = torch.randn(5, 3, 48, requires_grad=True)
    y = x.detach().clone().requires_grad_(True)
    four(x).square().sum().backward()
    plain(y).square().sum().backward()
    assert torch.equal(four(x), plain(y)) and torch.allclose(x.grad, y.grad, atol=1e-5)  # type: ignore[arg-type]
    assert [name for name, _ in four.named_parameters()] == (["bias"] if bias else [])


@needs_bitsandbytes
def test_layers_without_adapters_are_packed_too_and_come_back() -> None:
    critic = make_tiny().critic
    critic.add_adapters(LoraConfig(rank=1, targets=("q_proj",), quantize="nf4"), seed=1)
    assert sum(isinstance(module, NF4Linear) for module in critic.modules()) == 2 * 7
    assert type(critic.model.get_submodule("score")) is nn.Linear
    merge_adapters(critic)
    assert all(type(m) is nn.Linear for n, m in critic.named_modules() if n.endswith("_proj"))


@needs_bitsandbytes
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
