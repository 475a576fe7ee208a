"""Low-precision models in the local engine: float32 masters, moments and gradient sums, exact resume, plain weights."""

from __future__ import annotations

import pytest
import torch
from saved_states import restore, saved, whole_state
from torch import nn
from unit.ppo.tiny import make_tiny

from rlhf_core.config.model import LoraConfig, OptimizerConfig
from rlhf_core.models.adapters import add_adapters, merge_adapters
from rlhf_core.models.heads import ActorCritic, ScalarModel
from rlhf_core.training.engine.base import LocalEngine, build_adamw

PAPER = OptimizerConfig(lr=5e-7, schedule="constant", warmup=0.0, max_grad_norm=None)
IDS = torch.arange(12).view(2, 6)


def layer() -> nn.Linear:
    """5,040 weights between .01 and .05, the size that a pretrained model's have, in bfloat16."""
    made = nn.Linear(72, 70, bias=False)
    nn.init.uniform_(made.weight, 0.01, 0.05, generator=torch.Generator().manual_seed(0))
    return made.to(torch.bfloat16)


def steps(engine: LocalEngine, numbers: range) -> None:
    """Steps down a slope of every weight; its steepness changes, so that the moments count."""
    for number in numbers:
        engine.backward((1 + number % 3) * engine.model.weight.sum())
        engine.step()


def test_steps_that_would_round_to_nothing_add_up_in_the_masters() -> None:
    """AdamW at 5e-7 never moves a bfloat16 weight. Its master moves by 5e-7 a step, and in the end the weight does."""
    alone, engine = layer(), LocalEngine(layer(), PAPER, 4000)
    adamw, before = build_adamw(alone, PAPER), alone.weight.detach().clone()
    for _ in range(600):
        alone.weight.grad = torch.ones_like(alone.weight)
        adamw.step()
    assert torch.equal(alone.weight, before)
    for _ in range(10):
        engine.backward(engine.model.weight.sum())
        engine.step()
    (master,) = engine.masters.copies.values()
    assert master.dtype == torch.float32 and engine.model.weight.dtype == torch.bfloat16
    torch.testing.assert_close(before.float() - master, torch.full_like(master, 10 * 5e-7), rtol=0.02, atol=0)
    assert torch.equal(engine.model.weight, before)  # half the distance to the next value is 3e-5 or more
    for _ in range(590):
        engine.backward(engine.model.weight.sum())
        engine.step()
    torch.testing.assert_close(before.float() - master, torch.full_like(master, 600 * 5e-7), rtol=0.02, atol=0)
    assert torch.equal(engine.model.weight, master.bfloat16()) and bool((engine.model.weight != before).all())


def test_gradients_of_micro_batches_are_added_up_in_float32() -> None:
    """In bfloat16 the sum of 1 and sixteen times 1/512 is 1."""
    engine = LocalEngine(layer(), PAPER, 10)
    engine.backward(engine.model.weight.sum())
    for _ in range(16):
        engine.backward(engine.model.weight.sum() / 512)
    (master,) = engine.masters.copies.values()
    assert torch.equal(master.grad, torch.full_like(master, 1 + 16 / 512)) and engine.model.weight.grad is None
    assert engine.grad_norm() == pytest.approx((1 + 16 / 512) * 5040**0.5, rel=1e-5)


def test_resume_restores_masters_and_moments_bit_for_bit() -> None:
    whole, first, second = (LocalEngine(layer(), PAPER, 90) for _ in range(3))
    steps(whole, range(90))
    steps(first, range(41))
    assert {tensor.dtype for tensor in whole_state(first).values()} == {torch.float32}
    restore(second, saved(first))
    assert torch.equal(second.model.weight, first.model.weight)
    steps(second, range(41, 90))
    assert torch.equal(whole.model.weight, second.model.weight)
    resumed = whole_state(second)
    for name, tensor in whole_state(whole).items():
        assert torch.equal(tensor, resumed[name]), name


def test_gathered_and_released_weights_are_the_models_own() -> None:
    engine = LocalEngine(layer(), PAPER, 10)
    steps(engine, range(3))
    assert {weight.dtype for weight in engine.trained_weights().values()} == {torch.bfloat16}
    released = engine.release()
    assert not engine.optimizer.state and not engine.masters.copies and not engine.parameters
    released.weight.sum().backward()
    assert released.weight.grad is not None  # what comes after is no longer the engine's


def test_a_float32_model_has_no_masters() -> None:
    model = make_tiny().policy
    engine = LocalEngine(model, PAPER, 10)
    assert not engine.masters.copies
    assert all(a is b for a, b in zip(engine.parameters, model.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["policy", "reward", "adapters", "critic adapters", "shared"])
def test_whatever_is_trained_is_updated_in_float32(kind: str) -> None:
    """So that no setting of the local engine is left in which small updates round to nothing."""
    tiny, lora = make_tiny(), LoraConfig(rank=2, alpha=4)
    model: nn.Module = tiny.policy.to(torch.bfloat16)
    scalar = ScalarModel(tiny.critic.model.to(torch.bfloat16))
    if "adapters" in kind:
        pytest.importorskip("peft")
    match kind:
        case "reward":
            model = scalar
        case "adapters":
            add_adapters(tiny.policy, lora, 1)
        case "critic adapters":
            scalar.add_adapters(lora, 1)
            model = scalar
        case "shared":
            model = ActorCritic.with_head_of(scalar, tiny.policy)
    engine = LocalEngine(model, PAPER, 10)
    assert {p.dtype for group in engine.optimizer.param_groups for p in group["params"]} == {torch.float32}
    engine.backward(sum(p.float().sum() for p in model.parameters() if p.requires_grad))  # type: ignore[arg-type]
    engine.step()
    assert {slot.dtype for state in engine.optimizer.state.values() for slot in state.values()} == {torch.float32}


def test_adapters_are_float32_on_a_bfloat16_model() -> None:
    pytest.importorskip("peft")
    policy = make_tiny().policy.to(torch.bfloat16)
    before = policy(input_ids=IDS).logits
    add_adapters(policy, LoraConfig(rank=2, alpha=4), 1)
    assert {p.dtype for p in policy.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in policy.parameters() if not p.requires_grad} == {torch.bfloat16} == {policy.dtype}
    assert torch.equal(policy(input_ids=IDS).logits, before)
    layer = policy.model.layers[0].self_attn.q_proj
    with torch.no_grad():
        layer.lora_B["default"].weight.fill_(0.3)
    delta, weight = layer.get_delta_weight("default"), layer.base_layer.weight.detach().clone()
    assert delta.dtype == torch.float32 and bool(delta.any())
    merge_adapters(policy)
    assert {p.dtype for p in policy.parameters()} == {torch.bfloat16}
    torch.testing.assert_close(policy.model.layers[0].self_attn.q_proj.weight, (weight + delta).bfloat16())
