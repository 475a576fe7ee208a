"""Engines, schedules and optimisers: numbers by hand, how often metrics are read, and passes of
models at once.
"""

from __future__ import annotations

import math
import threading
from functools import partial

import pytest
import torch
from counted_calls import counted_reads
from hypothesis import given
from hypothesis import strategies as st
from saved_states import restore, saved
from torch import Tensor, nn

from rlhf_core.config.model import OptimizerConfig
from rlhf_core.errors import CheckpointError, TrainingPaused
from rlhf_core.training import passes
from rlhf_core.training.engine.base import LocalEngine, clip_scale, joint_step, lr_at
from rlhf_core.training.passes import device_scalar, read_scalars, run_side_by_side

CONSTANT = OptimizerConfig(lr=0.1, schedule="constant", warmup=0.0, max_grad_norm=1.0)


def linear(*weights: float) -> nn.Linear:
    layer = nn.Linear(len(weights), 1, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([weights]))
    return layer


def test_cosine_with_warmup() -> None:
    config = OptimizerConfig(lr=1.0, schedule="cosine", warmup=0.2, final_ratio=0.1)
    rates = [lr_at(step, 10, config) for step in range(11)]
    assert rates[:2] == [0.5, 1.0]
    assert rates[2] == pytest.approx(1.0)
    assert rates[6] == pytest.approx(0.55)  # half way through the eight steps of decay
    assert rates[10] == pytest.approx(0.1)


def test_inverse_square_root_and_constant() -> None:
    config = OptimizerConfig(lr=2.0, schedule="inverse_sqrt", warmup=0.04)
    assert lr_at(4, 100, config) == pytest.approx(2.0)
    assert lr_at(16, 100, config) == pytest.approx(1.0)
    assert lr_at(64, 100, config) == pytest.approx(0.5)
    assert lr_at(0, 100, CONSTANT) == lr_at(99, 100, CONSTANT) == 0.1
    assert lr_at(1, 100, CONSTANT, warmup_steps=4) == pytest.approx(0.05)


@given(
    st.integers(1, 500), st.floats(0, 1), st.sampled_from(["cosine", "inverse_sqrt", "constant"])
)
def test_rates_stay_between_zero_and_the_peak(total: int, warmup: float, schedule: str) -> None:
    config = OptimizerConfig(lr=3e-3, schedule=schedule, warmup=warmup)  # type: ignore[arg-type]
    rates = [lr_at(step, total, config) for step in range(total)]
    assert all(0 < rate <= 3e-3 * (1 + 1e-12) for rate in rates)


def test_clipping_by_global_norm_and_first_adam_step() -> None:
    engine = LocalEngine(linear(1.0, 1.0), CONSTANT, 10)
    engine.backward((engine.model.weight * torch.tensor([[3.0, 4.0]])).sum())
    assert clip_scale(5.0, 1.0) == pytest.approx(0.2)
    result = engine.step()
    assert result.grad_norm == pytest.approx(5.0) and result.lr == 0.1 and not result.skipped
    # Adam's first step is lr * sign(gradient), whatever the clip.
    assert engine.model.weight.tolist()[0] == pytest.approx([0.9, 0.9], abs=1e-6)
    moments = engine.optimizer.state[engine.model.weight]["exp_avg"]
    assert moments.tolist()[0] == pytest.approx([0.1 * 0.6, 0.1 * 0.8], abs=1e-5)


def test_norms_and_biases_do_not_decay() -> None:
    layer = nn.Linear(2, 2)
    engine = LocalEngine(layer, CONSTANT.model_copy(update={"weight_decay": 0.5}), 10)
    assert [(len(g["params"]), g["weight_decay"]) for g in engine.optimizer.param_groups] == [
        (1, 0.5),
        (1, 0.0),
    ]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_steps_are_skipped_and_counted_and_the_third_in_a_row_pauses(bad: float) -> None:
    engine = LocalEngine(linear(1.0), CONSTANT, 10, name="policy")
    for good in (False, True, False, False):
        engine.backward(engine.model.weight.sum() * (1.0 if good else bad))
        before = engine.model.weight.item()
        assert engine.step().skipped is not good
        assert (engine.model.weight.item() == before) is not good
    assert (engine.steps, engine.skipped_steps) == (4, 3)
    engine.backward(engine.model.weight.sum() * bad)
    with pytest.raises(
        TrainingPaused, match=r"policy: 3 steps in a row.*loss.*Lower optimizer\.lr"
    ):
        engine.step()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_gradient_of_a_finite_loss_is_skipped_too(bad: float) -> None:
    engine = LocalEngine(linear(1.0), CONSTANT, 10)
    engine.model.weight.register_hook(lambda gradient: gradient * bad)
    engine.backward(engine.model.weight.sum())
    assert engine.step().skipped and engine.model.weight.item() == 1.0


def test_a_bad_micro_batch_condemns_the_whole_step_only() -> None:
    engine = LocalEngine(linear(1.0), CONSTANT, 10)
    for factor in (1.0, math.nan, 1.0):
        engine.backward(engine.model.weight.sum() * factor)
    assert engine.step().skipped
    engine.backward(engine.model.weight.sum())
    assert engine.step().grad_norm == pytest.approx(1.0)


def test_joint_norm_of_two_engines() -> None:
    engines = [LocalEngine(linear(1.0), CONSTANT, 10), LocalEngine(linear(1.0), CONSTANT, 10)]
    for engine, gradient in zip(engines, (3.0, 4.0), strict=True):
        engine.backward(engine.model.weight.sum() * gradient)
    assert [r.grad_norm for r in joint_step(engines, 1.0)] == pytest.approx([5.0, 5.0])
    moments = [engine.optimizer.state[engine.model.weight]["exp_avg"].item() for engine in engines]
    assert moments == pytest.approx([0.06, 0.08], abs=1e-5)


def test_joint_step_skips_both_when_one_is_not_finite() -> None:
    engines = [LocalEngine(linear(1.0), CONSTANT, 10), LocalEngine(linear(1.0), CONSTANT, 10)]
    for engine, factor in zip(engines, (1.0, math.nan), strict=True):
        engine.backward(engine.model.weight.sum() * factor)
    assert all(r.skipped for r in joint_step(engines, 1.0))
    assert [engine.model.weight.item() for engine in engines] == [1.0, 1.0]


def test_a_step_that_is_passed_over_counts_in_the_schedule_and_nowhere_else() -> None:
    config = OptimizerConfig(lr=0.1, schedule="cosine", warmup=0.0)
    engine, again = (LocalEngine(linear(1.0), config, 4) for _ in range(2))
    engine.backward(engine.model.weight.sum())
    engine.step()
    before = engine.model.weight.item()
    engine.pass_over_step()
    engine.pass_over_step()
    assert engine.model.weight.item() == before and (engine.steps, engine.skipped_steps) == (3, 0)
    restore(again, saved(engine))
    assert again.optimizer_steps == engine.optimizer_steps == 1
    assert again.rate() == engine.rate() == pytest.approx(lr_at(3, 4, config))


def test_state_restores_bit_for_bit_and_refuses_another_model() -> None:
    def train(engine: LocalEngine, steps: range) -> None:
        for step in steps:
            engine.backward(
                (engine.model.weight * torch.tensor([[1.0, float(step)]])).square().sum()
            )
            engine.step()

    config = OptimizerConfig(lr=0.01, weight_decay=0.1)
    whole, first, second = (LocalEngine(linear(1.0, 2.0), config, 9) for _ in range(3))
    train(whole, range(9))
    train(first, range(4))
    restore(second, saved(first))
    train(second, range(4, 9))
    assert torch.equal(whole.model.weight, second.model.weight)
    assert whole.state()[1] == second.state()[1]
    with pytest.raises(CheckpointError, match="another model"):
        restore(LocalEngine(nn.Linear(2, 1), config, 9), saved(first))


def test_all_groups_are_read_at_once_and_numbers_stay_what_they_are() -> None:
    third = torch.tensor(1 / 3, requires_grad=True)
    groups = [{"a": device_scalar(third) / 7, "b": 0.1}, {"a": device_scalar(torch.tensor(3))}]
    with counted_reads() as calls:
        read = read_scalars(groups)
    assert calls.names == ["tolist"]
    assert read == [{"a": float(third.detach()) / 7, "b": 0.1}, {"a": 3.0}]


def test_numbers_alone_need_no_device() -> None:
    with counted_reads() as calls:
        assert read_scalars([{"a": 1.5}, {}]) == [{"a": 1.5}, {}]
    assert calls.names == []


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "idle_workers", lambda: 2)


def gradient_of(model: nn.Module, rows: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(rows).square().sum().backward()
    return [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]


def meet(barrier: threading.Barrier, name: str) -> str:
    barrier.wait(timeout=60)
    return name


@pytest.mark.usefixtures("two_cores")
def test_tasks_run_at_once_and_answer_in_order() -> None:
    barrier = threading.Barrier(2)  # passed only by two tasks that both run
    assert run_side_by_side(
        partial(meet, barrier, "a"), partial(meet, barrier, "b"), models=[]
    ) == ["a", "b"]


@pytest.mark.usefixtures("two_cores")
def test_gradients_have_the_same_bits_as_one_after_the_other() -> None:
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)) for _ in range(4)]
    rows = torch.randn(32, 8)
    expected = [gradient_of(model, rows) for model in models]
    tasks = [partial(gradient_of, model, rows) for model in models]
    for computed, wanted in zip(run_side_by_side(*tasks, models=models), expected, strict=True):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(computed, wanted, strict=True))


@pytest.mark.usefixtures("two_cores")
def test_the_first_error_is_raised_after_all_have_ended() -> None:
    ended = []

    def fail() -> None:
        raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        run_side_by_side(fail, lambda: ended.append(True), models=[])
    assert ended == [True]


class Adapted(nn.Linear):
    active_adapter = "default"


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)),
        Adapted(2, 2),
        nn.Embedding(1001, 10_000, device="meta"),
        "model",
    ],
    ids=["dropout", "adapters", "large", "no module"],
)
def test_what_keeps_state_or_is_large_runs_alone(model: object) -> None:
    threads = run_side_by_side(threading.get_ident, threading.get_ident, models=[model])
    assert threads == [threading.get_ident()] * 2


def test_cores_that_products_use_are_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert passes.idle_workers() == 2
