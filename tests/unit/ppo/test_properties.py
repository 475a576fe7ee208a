"""Properties: padding, order and micro-batch size never change a gradient; masked positions never matter."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.ppo.tiny import EOS, PAD, Tiny, accumulate_gradients, collect, make_config, make_learner, make_tiny

from rlhf_core.config.ppo import PpoConfig
from rlhf_core.ppo.advantages import gae, masked_whiten
from rlhf_core.ppo.experience import Experience
from rlhf_core.ppo.losses import ptx_loss_sum
from rlhf_core.ppo.update import PtxData, accumulate_ptx_gradient, update
from rlhf_core.training.device_scalars import totals_of_steps

MODELS = make_tiny()


def gradients(tiny: Tiny, experience: Experience, config: PpoConfig) -> torch.Tensor:
    """All gradients of policy and critic for one step on ``experience``, flat."""
    learner = make_learner(tiny, config)
    tiny.policy.zero_grad()
    tiny.critic.zero_grad()
    sign = {"off": 0.0, "bonus": -1.0, "target": 1.0}[config.entropy.kind]
    accumulate_gradients(learner, experience, 0.2, sign)
    if learner.ptx is not None:
        accumulate_ptx_gradient(learner, 0)
    found = [p.grad.flatten() for m in (tiny.policy, tiny.critic) for p in m.parameters() if p.grad is not None]
    return torch.cat(found)


SWITCHES: list[dict[str, Any]] = [
    {},
    {"surrogate": {"aggregation": "sequence"}},
    {"kl": {"placement": "loss", "estimator": "full"}, "advantage": {"normalize": True}},
    {"entropy": {"kind": "target", "weight": 0.1, "target": 1.0}},
]


@cache
def of_the_whole(switches: int) -> tuple[Experience, torch.Tensor]:
    """A rollout under some switches, and its gradients in one pass."""
    tiny, whole = MODELS.copy(), make_config(minibatches=1, micro_batch_size=8, **SWITCHES[switches])
    experience = collect(tiny, whole)
    return experience, gradients(tiny, experience, whole)


@settings(max_examples=12, deadline=None)
@given(size=st.integers(1, 9), order=st.permutations(range(8)), switches=st.integers(0, len(SWITCHES) - 1))
def test_micro_batches_and_order_never_change_the_gradient(size: int, order: list[int], switches: int) -> None:
    experience, expected = of_the_whole(switches)
    parts = make_config(minibatches=1, micro_batch_size=size, **SWITCHES[switches])
    found = gradients(MODELS.copy(), experience.select(order), parts)
    assert torch.allclose(found, expected, atol=2e-6, rtol=1e-4)


def test_long_texts_of_ptx_may_come_fewer_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    after: dict[int | None, torch.Tensor] = {}
    sizes: dict[int | None, list[int]] = {}
    for size in (None, 1):
        tiny, config = MODELS.copy(), make_config(minibatches=1, micro_batch_size=8, ptx={"micro_batch_size": size})
        passes: list[int] = []

        def counted(model: Any, pairs: Any, *rest: Any, passes: list[int] = passes) -> torch.Tensor:
            passes.append(len(pairs))
            return ptx_loss_sum(model, pairs, *rest)

        monkeypatch.setattr("rlhf_core.ppo.update.ptx_loss_sum", counted)
        update(make_learner(tiny, config), collect(tiny, config), 0.0, 0)
        after[size] = torch.cat([p.detach().flatten() for p in tiny.policy.parameters()])
        sizes[size] = passes
    assert sizes == {None: [8, 8], 1: [1] * 16}
    assert torch.allclose(after[1], after[None], atol=2e-6, rtol=1e-4)


@settings(max_examples=10, deadline=None)
@given(left=st.integers(0, 5), right=st.integers(0, 5), rubbish=st.integers(4, 20))
def test_padding_on_either_side_never_changes_the_gradient(left: int, right: int, rubbish: int) -> None:
    experience, expected = of_the_whole(0)
    found = gradients(MODELS.copy(), widen(experience, left, right, rubbish), make_config(minibatches=1))
    assert torch.allclose(found, expected, atol=2e-6, rtol=1e-4)


def widen(experience: Experience, left: int, right: int, rubbish: int) -> Experience:
    """More padding on both sides, filled with rubbish."""
    changed: dict[str, torch.Tensor] = {}
    for item in dataclasses.fields(experience):
        value = getattr(experience, item.name)
        if item.name == "tokens":
            changed[item.name] = torch.nn.functional.pad(value, (left, right), value=rubbish)
        elif item.name == "attention_mask":
            changed[item.name] = torch.nn.functional.pad(value, (left, right))
        elif item.name == "response_mask":
            changed[item.name] = torch.nn.functional.pad(value, (0, right))
        elif value.dim() == 2:
            changed[item.name] = torch.nn.functional.pad(value, (0, right), value=99.0)
    return dataclasses.replace(experience, **changed)


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_masked_positions_never_matter(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=2, max_size=5))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    mask = torch.arange(6).unsqueeze(0) < torch.tensor(lengths).unsqueeze(1)
    rewards, values = (torch.randn(len(lengths), 6, generator=generator, dtype=torch.float64) for _ in range(2))
    garbage = torch.tensor(float("nan"))
    clean = gae(rewards, values, mask, 0.97, 0.9)
    dirty = gae(rewards.where(mask, garbage), values.where(mask, garbage), mask, 0.97, 0.9)
    for one, other in zip(clean, dirty, strict=True):
        assert torch.equal(one, other) and not other[~mask].any()
    assert torch.equal(masked_whiten(values, mask), masked_whiten(values.where(mask, garbage), mask))


def test_ratio_is_one_before_the_first_step(tiny: Tiny) -> None:
    config = make_config()
    learner, experience = make_learner(tiny, config), collect(tiny, config)
    metrics = accumulate_gradients(learner, experience, 0.05, 0.0)
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5) and metrics["ratio_max"] == pytest.approx(
        1.0, abs=1e-4
    )
    assert metrics["clip_fraction"] == 0.0


def test_joint_norm_clips_both_together(tiny: Tiny) -> None:
    results = {}
    for mode in ("separate", "joint"):
        models = make_tiny()
        config = make_config(gradient_norm=mode, minibatches=1, vf_loss_weight=50.0)
        results[mode] = update(make_learner(models, config), collect(models, config), 0.05, 0).metrics
    policy, critic = (results["separate"][f"{name}_grad_norm"] for name in ("policy", "critic"))
    assert results["joint"]["policy_grad_norm"] == pytest.approx((policy**2 + critic**2) ** 0.5, rel=1e-5)


def test_minibatches_cover_the_rollout_once_per_epoch(tiny: Tiny) -> None:
    experience = collect(tiny, make_config())
    for count in (1, 2, 3, 8):
        parts = list(experience.minibatches(count, 5, 0))
        assert sorted(float(s) for part in parts for s in part.rewards) == sorted(experience.rewards.tolist())
        assert max(len(p) for p in parts) - min(len(p) for p in parts) <= 1
    orders = [torch.cat([p.rewards for p in experience.minibatches(2, 5, epoch)]) for epoch in (0, 0, 1)]
    assert torch.equal(orders[0], orders[1]) and not torch.equal(orders[0], orders[2])


def test_ptx_counts_targets_only() -> None:
    """By hand: the mean over target tokens of -log p, contexts and the first token of plain text left out."""
    tiny = make_tiny()
    pairs = [([5, 6], [7, EOS]), ([], [8, 9, EOS])]
    learner = dataclasses.replace(make_learner(tiny, make_config()), ptx=PtxData(pairs, 2, 0, PAD))
    loss = totals_of_steps([accumulate_ptx_gradient(learner, 0)])[0]["ptx_loss"]
    total = 0.0
    for context, target in pairs:
        ids = context + target
        with torch.no_grad():
            dist = torch.log_softmax(tiny.policy(torch.tensor([ids])).logits[0], -1)
        total -= sum(float(dist[i - 1, ids[i]]) for i in range(max(len(context), 1), len(ids)))
    assert loss == pytest.approx(total / 4, abs=1e-5)
