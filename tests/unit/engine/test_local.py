"""What needs no second rank: recomputed activations, skeletons, engines by launch settings, the missing package."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from saved_states import restore, saved
from torch import nn
from unit.engine import cases
from unit.ppo.tiny import make_tiny

from rlhf_core.config.operations import LaunchConfig
from rlhf_core.errors import CheckpointError, ModelError, RlhfError
from rlhf_core.runtime import distributed
from rlhf_core.training.engine.base import LocalEngine
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
        engine.backward(engine.forward(lambda model=model: model(input_ids=ids).logits.square().mean()))
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
        Skeleton(model).filled({"weight": torch.empty(0), "bias": torch.zeros(3)}, torch.device("cpu"))


def test_without_settings_the_engine_is_local_and_hands_back_its_model() -> None:
    model = make_tiny().policy
    engine = build_engine(model, cases.optimizer(0.1), 1, "policy", launched(LaunchConfig()))
    assert isinstance(engine, LocalEngine)
    assert finish(engine, model) is model
    assert FrozenModels().place(model) is model


def test_offloaded_weights_wait_on_the_cpu_and_are_never_copied_back(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = FrozenModels(LaunchConfig(frozen="offload"))
    model = frozen.place(make_tiny().reference)
    held = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    assert {id(tensor) for _, _, tensor in frozen.waiting} == held

    def places() -> dict[str, int]:
        return {name: tensor.data_ptr() for name, tensor in (*model.named_parameters(), *model.named_buffers())}

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
