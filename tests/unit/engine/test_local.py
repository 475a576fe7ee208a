"""What needs no second rank: recomputed activations, skeletons, engines by settings, float32
masters, exact resume.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from saved_states import restore, saved, whole_state
from torch import nn
from unit.engine import cases
from unit.ppo.tiny import make_tiny

from rlhf_core.config.model import LoraConfig, OptimizerConfig
from rlhf_core.config.operations import LaunchConfig
from rlhf_core.errors import CheckpointError, ModelError, RlhfError
from rlhf_core.models.adapters import add_adapters, merge_adapters
from rlhf_core.models.heads import ActorCritic, ScalarModel
from rlhf_core.runtime import distributed
from rlhf_core.training.engine.base import LocalEngine, build_adamw
from rlhf_core.training.engine.deepspeed import Skeleton
from rlhf_core.training.engine.factory import build_engine, finish
from rlhf_core.training.engine.frozen import FrozenModels
from rlhf_core.training.run_context import RunContext


def launched(launch: LaunchConfig) -> RunContext:
    """A run that is placed as ``launch`` says."""
    return RunContext(Path("work"), launch=launch)


def test_layers_recompute_in_evaluation_mode_and_change_no_gradient() -> None:
    ids = torch.arange(12).view(2, 6)
    gradients, calls = [], []
    for checkpointing in (False, True):
        model = make_tiny().policy
        launch = LaunchConfig(gradient_checkpointing=checkpointing)
        engine = build_engine(model, cases.optimizer(0.1), 1, "policy", launched(launch))
        count: list[int] = []
        model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, count=count: count.append(1))
        engine.backward(
            engine.forward(lambda model=model: model(input_ids=ids).logits.square().mean())
        )
        gradients.append([p.grad for p in model.parameters()])
        calls.append(len(count))
        assert not any(module.training for module in model.modules())
    assert calls == [1, 2]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_model_without_such_layers_is_refused() -> None:
    context = launched(LaunchConfig(gradient_checkpointing=True))
    with pytest.raises(ModelError, match="switch it off"):
        build_engine(nn.Linear(2, 2), cases.optimizer(0.1), 1, "policy", context)


def test_a_skeleton_holds_no_weights_until_it_is_filled_and_keeps_ties() -> None:
    model = make_tiny().policy
    model.lm_head.weight = model.model.embed_tokens.weight
    skeleton = Skeleton(model)
    assert all(p.device.type == "meta" for p in skeleton.model.parameters())
    weights = {name: p.detach() + 1 for name, p in model.named_parameters()}
    filled = skeleton.filled(weights, torch.device("cpu"))
    assert filled.lm_head.weight is filled.model.embed_tokens.weight
    assert all(torch.equal(p, weights[name]) for name, p in filled.named_parameters())
    assert filled(input_ids=torch.arange(6).view(1, 6)).logits.isfinite().all()


def test_weights_of_another_shape_do_not_fill_a_skeleton() -> None:
    model = nn.Linear(2, 3)
    with pytest.raises(ModelError, match=r"weight.*\(3, 2\)"):
        Skeleton(model).filled(
            {"weight": torch.empty(0), "bias": torch.zeros(3)}, torch.device("cpu")
        )


def test_without_settings_the_engine_is_local_and_hands_back_its_model() -> None:
    model = make_tiny().policy
    engine = build_engine(model, cases.optimizer(0.1), 1, "policy", launched(LaunchConfig()))
    assert isinstance(engine, LocalEngine)
    assert finish(engine, model) is model
    assert FrozenModels().place(model) is model


def test_offloaded_weights_wait_on_the_cpu_and_are_never_copied_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frozen = FrozenModels(LaunchConfig(frozen="offload"))
    model = frozen.place(make_tiny().reference)
    held = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    assert {id(tensor) for _, _, tensor in frozen.waiting} == held

    def places() -> dict[str, int]:
        return {
            name: tensor.data_ptr()
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
        }

    before = places()
    monkeypatch.setattr(distributed, "device", lambda: torch.device("meta"))
    for _ in range(2):
        with frozen.on_device():
            assert {weight.device.type for weight in model.parameters()} == {"meta"}
        assert places() == before


def test_a_scoring_model_is_loaded_once_however_many_ask_for_it(tmp_path: Path) -> None:
    make_tiny().reward.model.save_pretrained(tmp_path / "reward")
    (tmp_path / "reward" / "tokenizer.json").write_text("{}")
    frozen = FrozenModels(LaunchConfig(frozen="offload"))
    model = frozen.scalar(tmp_path / "reward")
    waiting = len(frozen.waiting)
    assert frozen.scalar(tmp_path / "other" / ".." / "reward") is model
    assert len(frozen.waiting) == waiting > 0
    assert not model.training and not any(p.requires_grad for p in model.parameters())


def test_a_missing_deepspeed_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    context = launched(LaunchConfig(engine="deepspeed"))
    with pytest.raises(RlhfError, match=r"pip install 'rlhf-pipeline\[gpu\]'"):
        build_engine(make_tiny().policy, cases.optimizer(0.1), 1, "policy", context)


def test_a_state_holds_what_is_trained_and_nothing_frozen() -> None:
    def frozen_but_head() -> LocalEngine:
        model = make_tiny().policy
        model.requires_grad_(False)
        model.lm_head.requires_grad_(True)
        return LocalEngine(model, cases.optimizer(0.1), 4, "policy")

    engine = frozen_but_head()
    engine.backward(engine.model(input_ids=torch.arange(6).view(1, 6)).logits.square().mean())
    engine.step()
    state = saved(engine)
    assert state.tensors.names == {
        "weights.lm_head.weight",
        *(f"optimizer.lm_head.weight.{slot}" for slot in ("exp_avg", "exp_avg_sq", "step")),
    }
    assert set(engine.trained_weights()) == {"lm_head.weight"}
    resumed = frozen_but_head()
    restore(resumed, state)
    assert torch.equal(resumed.model.lm_head.weight, engine.model.lm_head.weight)
    whole = LocalEngine(make_tiny().policy, cases.optimizer(0.1), 4, "policy")
    with pytest.raises(CheckpointError, match="of another model"):
        restore(whole, state)


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
    """AdamW at 5e-7 never moves a bfloat16 weight. Its master moves by 5e-7 a step, and in the end
    the weight does.
    """
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
    torch.testing.assert_close(
        before.float() - master, torch.full_like(master, 10 * 5e-7), rtol=0.02, atol=0
    )
    assert torch.equal(
        engine.model.weight, before
    )  # half the distance to the next value is 3e-5 or more
    for _ in range(590):
        engine.backward(engine.model.weight.sum())
        engine.step()
    torch.testing.assert_close(
        before.float() - master, torch.full_like(master, 600 * 5e-7), rtol=0.02, atol=0
    )
    assert torch.equal(engine.model.weight, master.bfloat16()) and bool(
        (engine.model.weight != before).all()
    )


def test_gradients_of_micro_batches_are_added_up_in_float32() -> None:
    """In bfloat16 the sum of 1 and sixteen times 1/512 is 1."""
    engine = LocalEngine(layer(), PAPER, 10)
    engine.backward(engine.model.weight.sum())
    for _ in range(16):
        engine.backward(engine.model.weight.sum() / 512)
    (master,) = engine.masters.copies.values()
    assert (
        torch.equal(master.grad, torch.full_like(master, 1 + 16 / 512))
        and engine.model.weight.grad is None
    )
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
    assert {p.dtype for group in engine.optimizer.param_groups for p in group["params"]} == {
        torch.float32
    }
    engine.backward(sum(p.float().sum() for p in model.parameters() if p.requires_grad))  # type: ignore[arg-type]
    engine.step()
    assert {slot.dtype for state in engine.optimizer.state.values() for slot in state.values()} == {
        torch.float32
    }


def test_adapters_are_float32_on_a_bfloat16_model() -> None:
    pytest.importorskip("peft")
    policy = make_tiny().policy.to(torch.bfloat16)
    before = policy(input_ids=IDS).logits
    add_adapters(policy, LoraConfig(rank=2, alpha=4), 1)
    assert {p.dtype for p in policy.parameters() if p.requires_grad} == {torch.float32}
    assert (
        {p.dtype for p in policy.parameters() if not p.requires_grad}
        == {torch.bfloat16}
        == {policy.dtype}
    )
    assert torch.equal(policy(input_ids=IDS).logits, before)
    layer = policy.model.layers[0].self_attn.q_proj
    with torch.no_grad():
        layer.lora_B["default"].weight.fill_(0.3)
    delta, weight = layer.get_delta_weight("default"), layer.base_layer.weight.detach().clone()
    assert delta.dtype == torch.float32 and bool(delta.any())
    merge_adapters(policy)
    assert {p.dtype for p in policy.parameters()} == {torch.bfloat16}
    torch.testing.assert_close(
        policy.model.layers[0].self_attn.q_proj.weight, (weight + delta).bfloat16()
    )
