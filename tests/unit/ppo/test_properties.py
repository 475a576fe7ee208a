"""Properties: padding, order, micro-batches by rows or by a budget of tokens, and ranks change no
gradient, sum or prediction; masked positions never matter."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from counted_calls import counted_reads
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from unit.engine import cases
from unit.ppo.tiny import (
    EOS,
    PAD,
    VOCABULARY,
    Tiny,
    accumulate_gradients,
    collect,
    make_config,
    make_learner,
    make_tiny,
)

from rlhf_core.config.ppo import PpoConfig
from rlhf_core.models import kernels
from rlhf_core.ppo.actor_critic import ActorCriticPair
from rlhf_core.ppo.advantages import gae, masked_whiten
from rlhf_core.ppo.experience import Experience
from rlhf_core.ppo.losses import ptx_loss_sum
from rlhf_core.ppo.reward_sources.source import reward_model_fn
from rlhf_core.ppo.update import (
    Learner,
    PtxData,
    accumulate_ptx_gradient,
    measure_minibatch,
    update,
)
from rlhf_core.runtime import distributed
from rlhf_core.sampling.token_scoring import (
    MOST_PADDING,
    MicroBatchLimits,
    Tokens,
    divide_for_ranks,
    filled_parts,
    response_logits,
)
from rlhf_core.training.passes import totals_of_steps

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
    found = [
        p.grad.flatten()
        for m in (tiny.policy, tiny.critic)
        for p in m.parameters()
        if p.grad is not None
    ]
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
    tiny, whole = (
        MODELS.copy(),
        make_config(minibatches=1, micro_batch_size=8, **SWITCHES[switches]),
    )
    experience = collect(tiny, whole)
    return experience, gradients(tiny, experience, whole)


@settings(max_examples=12, deadline=None)
@given(
    size=st.integers(1, 9),
    order=st.permutations(range(8)),
    switches=st.integers(0, len(SWITCHES) - 1),
)
def test_micro_batches_and_order_never_change_the_gradient(
    size: int, order: list[int], switches: int
) -> None:
    experience, expected = of_the_whole(switches)
    parts = make_config(minibatches=1, micro_batch_size=size, **SWITCHES[switches])
    found = gradients(MODELS.copy(), experience.select(order), parts)
    assert torch.allclose(found, expected, atol=2e-6, rtol=1e-4)


def test_long_texts_of_ptx_may_come_fewer_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    after: dict[int | None, torch.Tensor] = {}
    sizes: dict[int | None, list[int]] = {}
    for size in (None, 1):
        tiny, config = (
            MODELS.copy(),
            make_config(minibatches=1, micro_batch_size=8, ptx={"micro_batch_size": size}),
        )
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
def test_padding_on_either_side_never_changes_the_gradient(
    left: int, right: int, rubbish: int
) -> None:
    experience, expected = of_the_whole(0)
    found = gradients(
        MODELS.copy(), widen(experience, left, right, rubbish), make_config(minibatches=1)
    )
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
    rewards, values = (
        torch.randn(len(lengths), 6, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    garbage = torch.tensor(float("nan"))
    clean = gae(rewards, values, mask, 0.97, 0.9)
    dirty = gae(rewards.where(mask, garbage), values.where(mask, garbage), mask, 0.97, 0.9)
    for one, other in zip(clean, dirty, strict=True):
        assert torch.equal(one, other) and not other[~mask].any()
    assert torch.equal(
        masked_whiten(values, mask), masked_whiten(values.where(mask, garbage), mask)
    )


def test_ratio_is_one_before_the_first_step(tiny: Tiny) -> None:
    config = make_config()
    learner, experience = make_learner(tiny, config), collect(tiny, config)
    metrics = accumulate_gradients(learner, experience, 0.05, 0.0)
    assert (metrics["ratio_mean"], metrics["ratio_max"]) == pytest.approx((1.0, 1.0), abs=1e-4)
    assert metrics["clip_fraction"] == 0.0


def test_joint_norm_clips_both_together(tiny: Tiny) -> None:
    results = {}
    for mode in ("separate", "joint"):
        models = make_tiny()
        config = make_config(gradient_norm=mode, minibatches=1, vf_loss_weight=50.0)
        results[mode] = update(
            make_learner(models, config), collect(models, config), 0.05, 0
        ).metrics
    policy, critic = (results["separate"][f"{name}_grad_norm"] for name in ("policy", "critic"))
    assert results["joint"]["policy_grad_norm"] == pytest.approx(
        (policy**2 + critic**2) ** 0.5, rel=1e-5
    )


def test_minibatches_cover_the_rollout_once_per_epoch(tiny: Tiny) -> None:
    experience = collect(tiny, make_config())
    for count in (1, 2, 3, 8):
        parts = list(experience.minibatches(count, 5, 0))
        assert sorted(float(s) for part in parts for s in part.rewards) == sorted(
            experience.rewards.tolist()
        )
        assert max(len(p) for p in parts) - min(len(p) for p in parts) <= 1
    orders = [
        torch.cat([p.rewards for p in experience.minibatches(2, 5, epoch)]) for epoch in (0, 0, 1)
    ]
    assert torch.equal(orders[0], orders[1]) and not torch.equal(orders[0], orders[2])


def test_ptx_counts_targets_only() -> None:
    """By hand: the mean over target tokens of -log p, contexts and the first token of plain text
    left out.
    """
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


LENGTHS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=20)


def replies(lengths: list[tuple[int, int]]) -> Tokens:
    """Rows of a prompt and a reply; every token is its row and its place among the row's real
    tokens.
    """
    prompt, reply = (max(column) for column in zip(*lengths, strict=True))
    ids = torch.zeros(len(lengths), prompt + reply, dtype=torch.long)
    attention, mask = torch.zeros_like(ids), torch.zeros(len(lengths), reply, dtype=torch.bool)
    for row, (before, after) in enumerate(lengths):
        span = slice(prompt - before, prompt + after)
        ids[row, span] = 100 * row + torch.arange(before + after)
        attention[row, span] = 1
        mask[row, :after] = True
    return Tokens(ids, attention, mask)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 120), st.none() | st.integers(1, 5), st.integers(1, 4))
def test_parts_keep_budget_padding_and_ranks(
    lengths: list[tuple[int, int]], budget: int, most_rows: int | None, ranks: int
) -> None:
    totals = [before + after for before, after in lengths]
    parts = filled_parts(totals, budget, most_rows)
    for part in parts:
        width = max(totals[row] for row in part)
        assert len(part) == 1 or len(part) * width <= budget
        assert len(part) <= (most_rows or len(part))
        assert (
            len(part) * width - sum(totals[row] for row in part)
            <= MOST_PADDING * len(part) * width + 1e-9
        )
    divide_for_ranks(parts, ranks)
    assert sorted(row for part in parts for row in part) == list(range(len(totals)))
    assert len(parts) % ranks == 0 or all(len(part) == 1 for part in parts)


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.integers(10, 120))
def test_compact_rows_hold_the_same_tokens(lengths: list[tuple[int, int]], budget: int) -> None:
    batch = replies(lengths)
    limits, computed = MicroBatchLimits(tokens=budget), 0
    for micro in limits.split(batch):
        part = micro.tokens
        computed += part.tokens.numel()
        assert bool(part.attention_mask[:, 0].all()), "rows begin in the first column"
        for number, row in enumerate(micro.rows.tolist()):
            before, after = lengths[row]
            real = 100 * row + torch.arange(before + after)
            assert torch.equal(part.tokens[number][part.attention_mask[number].bool()], real)
            assert torch.equal(part.tokens[number][part.reply_mask[number].bool()], real[before:])
            assert torch.equal(part.response[number, :after], real[before:])
            states = part.before_and_at_replies(part.tokens)[number]
            assert torch.equal(states[: after + 1], real[before - 1 :]), (
                "the states before each token, and the last"
            )
            assert part.response_mask[number].tolist() == [True] * after + [False] * (
                part.width - after
            )
    useful = sum(before + after for before, after in lengths)
    assert limits.padding_share(batch) == pytest.approx(1 - useful / computed)
    assert limits.padding_share(batch) <= MOST_PADDING + 1e-9


def test_rows_of_one_pass() -> None:
    assert MicroBatchLimits().most_rows(100) == 16
    assert MicroBatchLimits(4).most_rows(100) == 4
    assert MicroBatchLimits(tokens=1000).most_rows(300) == 3
    assert MicroBatchLimits(2, 1000).most_rows(300) == 2
    assert MicroBatchLimits(4, 1000).most_rows(2000) == 1, (
        "a longer sequence makes a pass of its own"
    )


def test_padding_share_by_hand() -> None:
    batch = replies([(1, 3), (4, 1), (2, 2), (3, 3)])
    # Two rows at a time by length: (1, 3) with (2, 2), five columns; (4, 1) with (3, 3), seven
    # columns.
    assert MicroBatchLimits(2).padding_share(batch) == pytest.approx(1 - 19 / (2 * 5 + 2 * 7))
    assert MicroBatchLimits().padding_share(batch) == pytest.approx(1 - 19 / (4 * 7))
    # Compact: 6, 5 and the two of 4.
    assert MicroBatchLimits(tokens=100).padding_share(batch) == pytest.approx(
        1 - 19 / (2 * 6 + 2 * 4)
    )


LOSSES: dict[str, dict[str, Any]] = {
    "plain": {},
    "shared": {"critic_mode": "shared"},
    "per sequence": {"surrogate": {"aggregation": "sequence"}},
    "exact KL": {"kl": {"placement": "loss", "estimator": "full", "coefficient": 0.2}},
    "entropy": {
        "entropy": {"kind": "bonus", "weight": 0.1},
        "temperature": 0.7,
        "min_new_tokens": 2,
    },
}


BY_ROWS = {"micro_batch_size": 64, "micro_batch_tokens": None}
IN_PARTS: dict[str, dict[str, Any]] = {
    "a budget of tokens": {"micro_batch_tokens": 24},
    "chunks of positions": BY_ROWS | {"logits_bytes": 4 * VOCABULARY * 4},
}


@pytest.mark.parametrize("parts", IN_PARTS)
@pytest.mark.parametrize(
    ("name", "own_logits"), [*((name, False) for name in LOSSES), ("exact KL", True)]
)
def test_parts_change_neither_loss_nor_gradient(parts: str, name: str, own_logits: bool) -> None:
    results: list[tuple[dict[str, float], list[Tensor], list[Tensor | None]]] = []
    for limits in (BY_ROWS, IN_PARTS[parts]):
        tiny = make_tiny()
        for model in (tiny.policy, tiny.reference):
            model._rlhf_plain_head = not own_logits
        config = make_config(**LOSSES[name])
        learner = make_learner(tiny, config, **limits)
        experience = collect(tiny, config, pair=learner.pair)
        metrics = measure_minibatch(learner.pair, experience)
        metrics |= accumulate_gradients(learner, experience, 0.2, -1.0)
        fields = ("policy_logprobs", "ref_logprobs", "full_kl", "entropy", "values")
        columns = [getattr(experience, field) for field in fields]
        passes = MicroBatchLimits(tokens=limits.get("micro_batch_tokens"))
        columns.append(reward_model_fn(tiny.reward, passes)(experience.batch))
        gradients = [p.grad for model in (tiny.policy, tiny.critic) for p in model.parameters()]
        results.append((metrics, columns, gradients))
    (metrics, columns, gradients), (metrics_in_parts, columns_in_parts, gradients_in_parts) = (
        results
    )
    assert metrics_in_parts == pytest.approx(metrics, rel=1e-4, abs=1e-5)
    torch.testing.assert_close(columns_in_parts, columns, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients_in_parts, gradients, rtol=1e-3, atol=1e-6)


def test_a_model_that_makes_logits_itself_makes_none_of_what_all_prompts_begin_with() -> None:
    model = make_tiny().policy
    model._rlhf_plain_head = False
    made: list[int] = []
    model.get_output_embeddings().register_forward_pre_hook(
        lambda _, inputs: made.append(inputs[0].shape[1])
    )
    lengths = [(3, 3), (4, 2), (5, 1)]
    tokens = replies(lengths)
    tokens = replace(tokens, tokens=tokens.tokens % 7)
    (micro,) = MicroBatchLimits(tokens=100).split(tokens)
    logits = response_logits(model, micro.tokens).whole()
    assert made == [
        4
    ]  # columns 2 to 5: before the first reply token of the shortest prompt, and all after it
    expected = response_logits(model, tokens).whole()[micro.rows]
    mask = micro.tokens.response_mask
    torch.testing.assert_close(logits[:, :-1][mask], expected[:, : mask.shape[1]][mask])


def test_ranks_share_the_parts_and_make_as_many_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, limits = replies([(1, 3), (4, 1), (2, 2), (3, 3), (9, 9)]), MicroBatchLimits(tokens=10)
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    shards = []
    for rank in range(2):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        shards.append([(micro.rows.tolist(), micro.weight) for micro in limits.split(batch)])
    assert len(shards[0]) == len(shards[1])
    rows = sorted(row for shard in shards for part, weight in shard if weight for row in part)
    assert rows == [0, 1, 2, 3, 4]


def test_a_lone_sequence_on_many_ranks_is_repeated_with_weight_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(distributed, "world_size", lambda: 3)
    monkeypatch.setattr(distributed, "rank", lambda: 2)
    assert [
        (m.rows.tolist(), m.weight) for m in MicroBatchLimits(tokens=9).split(replies([(2, 2)]))
    ] == [([0], 0.0)]


@pytest.fixture(scope="module")
def experience() -> Experience:
    return cases.rollout(make_tiny())


def reads_of_an_update(experience: Experience, rows: int) -> list[str]:
    """Reads of one step with micro-batches of ``rows``, without those of transformers, which looks
    at every mask.
    """
    tiny, config = make_tiny(), cases.ppo_config(0.05, minibatches=1)
    config = config.model_copy(update={"target_kl_early_stop": 100.0})
    engines = {
        "policy": cases.local(tiny.policy, config.policy_optimizer, "policy"),
        "critic": cases.local(tiny.critic, config.critic_optimizer, "critic"),
    }
    pair = ActorCriticPair(tiny.policy, tiny.critic, engines, tiny.sampling, MicroBatchLimits(rows))
    with counted_reads() as calls:
        updated = update(Learner(config, pair, tiny.reference), experience, 0.1, 0)
    assert updated.metrics["steps"] == 1 and not updated.paused
    return [name for name in calls.names if name != "__bool__"]


def test_reads_do_not_grow_with_micro_batches(
    experience: Experience, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        kernels, "openblas_pays", lambda: False
    )  # NumPy, which it is part of, reads tensors
    whole = reads_of_an_update(experience, rows=len(experience))
    assert sorted(reads_of_an_update(experience, rows=1)) == sorted(whole)
    # Norm and losses of both engines, metrics of both models and those before the step, lengths and
    # sizes of the parts.
    assert len(whole) <= 12
