"""Passes of several models at once."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from rlhf_core.training import side_by_side
from rlhf_core.training.side_by_side import run_side_by_side


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "idle_workers", lambda: 2)


def gradient_of(model: nn.Module, rows: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(rows).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def meet(barrier: threading.Barrier, name: str) -> str:
    barrier.wait(timeout=60)
    return name


@pytest.mark.usefixtures("two_cores")
def test_tasks_run_at_once_and_answer_in_order() -> None:
    barrier = threading.Barrier(2)  # passed only by two tasks that both run
    assert run_side_by_side(partial(meet, barrier, "a"), partial(meet, barrier, "b"), models=[]) == ["a", "b"]


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
    assert side_by_side.idle_workers() == 2
