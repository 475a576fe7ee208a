"""Micro-batches by a budget of tokens: little padding, and the sums, gradients and predictions of the whole batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from unit.ppo.tiny import accumulate_gradients, collect, make_config, make_learner, make_tiny

from rlhf_core.ppo.reward_sources.source import reward_model_fn
from rlhf_core.ppo.update import measure_minibatch
from rlhf_core.runtime import distributed
from rlhf_core.sampling.token_scoring import (
    MOST_PADDING,
    MicroBatchLimits,
    Tokens,
    divide_for_ranks,
    filled_parts,
    response_logits,
)

LENGTHS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=20)


def replies(lengths: list[tuple[int, int]]) -> Tokens:
    """Rows of a prompt and a reply; every token is its row and its place among the row's real tokens."""
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
        assert len(part) * width - sum(totals[row] for row in part) <= MOST_PADDING * len(part) * width + 1e-9
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
            assert torch.equal(states[: after + 1], real[before - 1 :]), "the states before each token, and the last"
            assert part.response_mask[number].tolist() == [True] * after + [False] * (part.width - after)
    useful = sum(before + after for before, after in lengths)
    assert limits.padding_share(batch) == pytest.approx(1 - useful / computed)
    assert limits.padding_share(batch) <= MOST_PADDING + 1e-9


def test_rows_of_one_pass() -> None:
    assert MicroBatchLimits().most_rows(100) == 16
    assert MicroBatchLimits(4).most_rows(100) == 4
    assert MicroBatchLimits(tokens=1000).most_rows(300) == 3
    assert MicroBatchLimits(2, 1000).most_rows(300) == 2
    assert MicroBatchLimits(4, 1000).most_rows(2000) == 1, "a longer sequence makes a pass of its own"


def test_padding_share_by_hand() -> None:
    batch = replies([(1, 3), (4, 1), (2, 2), (3, 3)])
    # Two rows at a time by length: (1, 3) with (2, 2), five columns; (4, 1) with (3, 3), seven columns.
    assert MicroBatchLimits(2).padding_share(batch) == pytest.approx(1 - 19 / (2 * 5 + 2 * 7))
    assert MicroBatchLimits().padding_share(batch) == pytest.approx(1 - 19 / (4 * 7))
    # Compact: 6, 5 and the two of 4.
    assert MicroBatchLimits(tokens=100).padding_share(batch) == pytest.approx(1 - 19 / (2 * 6 + 2 * 4))


LOSSES: dict[str, dict[str, Any]] = {
    "plain": {},
    "shared": {"critic_mode": "shared"},
    "per sequence": {"surrogate": {"aggregation": "sequence"}},
    "exact KL": {"kl": {"placement": "loss", "estimator": "full", "coefficient": 0.2}},
    "entropy": {"entropy": {"kind": "bonus", "weight": 0.1}, "temperature": 0.7, "min_new_tokens": 2},
}


@pytest.mark.parametrize(("name", "own_logits"), [*((name, False) for name in LOSSES), ("exact KL", True)])
def test_a_budget_changes_neither_loss_nor_gradient(name: str, own_logits: bool) -> None:
    results: list[tuple[dict[str, float], list[Tensor], list[Tensor | None]]] = []
    by_rows = {"micro_batch_size": 64, "micro_batch_tokens": None}
    for limits in (by_rows, {"micro_batch_tokens": 24}):
        tiny = make_tiny()
        for model in (tiny.policy, tiny.reference):
            model._rlhf_plain_head = not own_logits
        config = make_config(**LOSSES[name])
        learner = make_learner(tiny, config, **limits)
        experience = collect(tiny, config, pair=learner.pair)
        metrics = measure_minibatch(learner.pair, experience)
        metrics |= accumulate_gradients(learner, experience, 0.2, -1.0)
        columns = [experience.policy_logprobs, experience.ref_logprobs, experience.full_kl, experience.values]
        columns.append(reward_model_fn(tiny.reward, None, limits.get("micro_batch_tokens"))(experience.batch))
        gradients = [p.grad for model in (tiny.policy, tiny.critic) for p in model.parameters()]
        results.append((metrics, columns, gradients))
    (metrics, columns, gradients), (metrics_in_parts, columns_in_parts, gradients_in_parts) = results
    assert metrics_in_parts == pytest.approx(metrics, rel=1e-4, abs=1e-5)
    torch.testing.assert_close(columns_in_parts, columns, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients_in_parts, gradients, rtol=1e-3, atol=1e-5)


def test_a_model_that_makes_logits_itself_makes_none_of_what_all_prompts_begin_with() -> None:
    model = make_tiny().policy
    model._rlhf_plain_head = False
    made: list[int] = []
    model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: made.append(inputs[0].shape[1]))
    lengths = [(3, 3), (4, 2), (5, 1)]
    tokens = replies(lengths)
    tokens = replace(tokens, tokens=tokens.tokens % 7)
    (micro,) = MicroBatchLimits(tokens=100).split(tokens)
    logits = response_logits(model, micro.tokens).whole()
    assert made == [4]  # columns 2 to 5: before the first reply token of the shortest prompt, and all after it
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


def test_a_lone_sequence_on_many_ranks_is_repeated_with_weight_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "world_size", lambda: 3)
    monkeypatch.setattr(distributed, "rank", lambda: 2)
    assert [(m.rows.tolist(), m.weight) for m in MicroBatchLimits(tokens=9).split(replies([(2, 2)]))] == [([0], 0.0)]
