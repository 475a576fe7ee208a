"""Adapters: nothing at first, the only thing that is trained, off for the reference, merged for export."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from unit.models.adapted import IDS, LORA, NF4, logits, needs_bitsandbytes, needs_peft, train_adapters
from unit.models.test_lower_layers import gpt2, llama
from unit.ppo.tiny import Tiny, make_config, make_tiny, make_trainer

from rlhf_core.config.model import LoraConfig
from rlhf_core.errors import ModelError, RlhfError
from rlhf_core.models.adapters import WithoutAdapters, add_adapters, merge_adapters

EITHER = [LORA, pytest.param(NF4, marks=needs_bitsandbytes, id="nf4")]


@needs_peft
def test_only_adapters_are_trained_and_the_reference_stays_what_it_was() -> None:
    tiny = make_tiny()
    before = logits(tiny.policy)
    weights = {name: p.detach().clone() for name, p in tiny.policy.named_parameters()}
    add_adapters(tiny.policy, LORA, seed=1)
    reference = WithoutAdapters(tiny.policy)
    assert torch.equal(logits(tiny.policy), before)
    trainable = [name for name, p in tiny.policy.named_parameters() if p.requires_grad]
    # Two layers of seven matrices, each with an A and a B.
    assert len(trainable) == 2 * 7 * 2 and all("lora_" in name for name in trainable)
    train_adapters(tiny)
    assert torch.equal(logits(reference), before)
    assert [name for name, p in tiny.policy.named_parameters() if p.requires_grad] == trainable
    after = logits(tiny.policy)
    assert not torch.allclose(after, before, atol=1e-3)
    merge_adapters(tiny.policy)
    assert torch.allclose(logits(tiny.policy), after, atol=1e-5)
    assert {name for name, _ in tiny.policy.named_parameters()} == set(weights)
    assert all(p.requires_grad for p in tiny.policy.parameters())


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
def test_ppo_with_adapters_keeps_its_reference_and_resumes_exactly(tmp_path: Path, lora: LoraConfig) -> None:
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
        (llama, LoraConfig(upper_layers=3), r"upper_layers is 3, but LlamaForCausalLM has 2 layers"),
        (gpt2, LORA, "GPT2LMHeadModel has no linear layers that lora could adapt"),  # it has layers of its own class
    ],
)
def test_what_a_model_does_not_have_cannot_be_adapted(make: Any, lora: LoraConfig, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        add_adapters(make(), lora, seed=1)


def test_a_missing_peft_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(RlhfError, match=r"pip install 'rlhf-pipeline\[lora\]'"):
        add_adapters(make_tiny().policy, LORA, seed=1)


@needs_peft
def test_on_a_shared_backbone_adapters_and_the_value_head_are_trained(tmp_path: Path) -> None:
    tiny = make_tiny()
    add_adapters(tiny.policy, LoraConfig(rank=2), seed=1)
    without: Any = WithoutAdapters(tiny.policy)
    tiny.reference = without
    before = {name: parameter.detach().clone() for name, parameter in tiny.policy.named_parameters()}
    trainer = make_trainer(tiny, make_config(critic_mode="shared", iterations=2), tmp_path)
    head = trainer.learner.pair.critic.score.weight.detach().clone()  # type: ignore[attr-defined]
    trainer.run()
    moved = {name for name, parameter in tiny.policy.named_parameters() if not torch.equal(parameter, before[name])}
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
    tiny.policy.model.layers[0].register_forward_hook(lambda module, inputs, output: states.append(output))
    tiny.policy(input_ids=IDS).logits.sum().backward()
    assert not states[0].requires_grad


def test_stacked_adapters_reach_the_deeper_of_both() -> None:
    four, six = (LORA.model_copy(update={"upper_layers": depth}) for depth in (4, 6))
    assert four.stacked_with(six) == LoraConfig(rank=4, alpha=4, upper_layers=6)
    assert six.stacked_with(four).upper_layers == 6
    assert four.stacked_with(LORA).upper_layers is None
    queries, values = (LORA.model_copy(update={"targets": (name,)}) for name in ("q_proj", "v_proj"))
    assert queries.stacked_with(values).targets == ("q_proj", "v_proj")
    assert queries.stacked_with(LORA).targets == ()
