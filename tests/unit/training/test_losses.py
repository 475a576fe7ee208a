"""Losses by hand, and that batching, padding and masked positions never change them."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel
from unit.training.tiny import SHAPE

from rlhf_core.config.model import SamplingConfig
from rlhf_core.config.reward import PairBatchConfig, RewardConfig
from rlhf_core.data.batches import TokenisedPair, pair_sequences, partitions
from rlhf_core.data.schema import Demonstration, Message
from rlhf_core.data.tokens import left_pad, right_pad
from rlhf_core.models.causal_lm import new_model, train_tokenizer
from rlhf_core.models.forward import selected_logits
from rlhf_core.models.heads import ScalarModel
from rlhf_core.training.examples import Example, LengthBucketedBatches, collate
from rlhf_core.training.losses import StepTotals, centering_loss, pairwise_loss, token_cross_entropy
from rlhf_core.training.passes import read_scalars
from rlhf_core.training.reward.trainer import (
    PairBatches,
    pair_batch,
    pair_loss,
    score_pairs,
)
from rlhf_core.training.sft import example_batch, mean_reply_loss, reply_loss, sample_replies

CPU = torch.device("cpu")
VOCABULARY = 261
token = st.integers(5, VOCABULARY - 1)
sequence = st.lists(token, min_size=1, max_size=9)


@pytest.fixture(scope="module")
def model():  # type: ignore[no-untyped-def]
    return new_model(SHAPE, train_tokenizer(["a b"], VOCABULARY), seed=3).double().eval()


@pytest.fixture(scope="module")
def scalar(workspace):  # type: ignore[no-untyped-def]
    return ScalarModel.from_causal_lm(workspace / "models/base", 5).double()


@pytest.mark.parametrize(
    ("words", "new_tokens", "kept"), [((3, 80, 2), 20, [0, 2]), ((3, 80), 64, []), ((), 8, [])]
)
def test_sample_replies_leave_out_prompts_without_room_for_one(
    words: tuple[int, ...], new_tokens: int, kept: list[int]
) -> None:
    tokenizer = train_tokenizer(["a b"], VOCABULARY)
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=16, n_layer=1, n_head=2)
    model = GPT2LMHeadModel(config)  # its positions are learned, and there are no others
    rows = [
        Demonstration(str(n), [Message("user", " ".join("a" * count))], f"reply {n}", "", "", "")
        for n, count in enumerate(words)
    ]
    samples = sample_replies(
        model, tokenizer, rows, SamplingConfig(max_new_tokens=new_tokens), seed=1
    )
    assert [sample["reference"] for sample in samples] == [f"reply {n}" for n in kept]


def test_sample_replies_follow_the_settings_alone(model) -> None:  # type: ignore[no-untyped-def]
    tokenizer, row = (
        train_tokenizer(["a b"], VOCABULARY),
        Demonstration("", [Message("user", "a")], "", "", "", ""),
    )
    expected = sample_replies(model, tokenizer, [row] * 4, SamplingConfig(max_new_tokens=8), seed=1)
    published = copy.deepcopy(model)
    published.generation_config.update(min_p=1.0, no_repeat_ngram_size=1)
    own = published.generation_config
    assert (
        sample_replies(published, tokenizer, [row] * 4, SamplingConfig(max_new_tokens=8), seed=1)
        == expected
    )
    assert published.generation_config is own


def test_cross_entropy_by_hand() -> None:
    # Uniform logits over 4 entries: log 4 nats a token; two tokens over a total of five.
    assert token_cross_entropy(torch.zeros(2, 4), torch.tensor([0, 3]), 5).item() == pytest.approx(
        2 * math.log(4) / 5
    )
    logits = torch.tensor([[math.log(3.0), 0.0]])
    assert token_cross_entropy(logits, torch.tensor([0]), 1).item() == pytest.approx(
        math.log(4 / 3)
    )


def test_pairwise_and_centring_by_hand() -> None:
    chosen, rejected = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 0.0])
    expected = (math.log1p(math.exp(-1)) + math.log(2)) / 2
    assert pairwise_loss(chosen, rejected, None, 2).item() == pytest.approx(expected)
    with_margin = pairwise_loss(chosen[:1], rejected[:1], torch.tensor([1.0]), 1)
    assert with_margin.item() == pytest.approx(math.log(2))
    assert centering_loss(
        torch.tensor([2.0, 1.0]), torch.tensor([1.0, -1.0]), 2
    ).item() == pytest.approx(4.5)
    assert math.isfinite(pairwise_loss(torch.tensor([-1e4]), torch.tensor([1e4]), None, 1).item())


def test_only_reply_tokens_are_targets() -> None:
    batch = collate([[7, 8, 9], [7]], [[10, 4], [11, 12, 4]], pad=4)  # pad equals end-of-sequence
    assert batch.input_ids.tolist() == [[7, 8, 9, 10, 4], [7, 11, 12, 4, 4]]
    assert batch.select.int().tolist() == [[0, 0, 1, 1, 0], [1, 1, 1, 0, 0]]
    assert batch.targets.tolist() == [10, 4, 11, 12, 4]
    shifted = batch.input_ids[:, 1:][batch.select[:, :-1]]
    assert shifted.tolist() == batch.targets.tolist()


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.tuples(sequence, sequence), min_size=2, max_size=6), st.integers(1, 6), st.randoms()
)
def test_micro_batches_and_order_change_neither_loss_nor_gradient(
    model, rows, size, random
) -> None:  # type: ignore[no-untyped-def]
    examples = [Example(prompt, reply) for prompt, reply in rows]
    total = sum(len(example.reply) for example in examples)

    def measured(parts: list[list[Example]]) -> tuple[float, torch.Tensor]:
        model.zero_grad()
        losses = [reply_loss(model, example_batch(part, 0, CPU), total) for part in parts]
        for loss in losses:
            loss.backward()
        return sum(float(loss.detach()) for loss in losses), torch.cat(
            [p.grad.flatten() for p in model.parameters()]
        )

    loss, gradient = measured([examples])
    shuffled = random.sample(examples, len(examples))
    loss_in_parts, gradient_in_parts = measured(
        [shuffled[i : i + size] for i in range(0, len(shuffled), size)]
    )
    assert loss_in_parts == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(gradient_in_parts, gradient, rtol=1e-4, atol=1e-6)
    assert mean_reply_loss(model, examples, 0) == pytest.approx(loss, rel=1e-5)


@settings(max_examples=15, deadline=None)
@given(st.lists(sequence, min_size=1, max_size=5), st.integers(0, 260), st.integers(0, 260))
def test_padding_side_and_content_change_no_number(model, scalar, rows, pad, other) -> None:  # type: ignore[no-untyped-def]
    results, scores = [], []
    for side, filler in ((right_pad, pad), (left_pad, pad), (left_pad, other)):
        ids, mask = side([*rows, [9] * 12], filler)
        results.append(selected_logits(model, ids, mask, mask.bool()).whole())
        scores.append(scalar.reply_scores(ids, mask))
    single = torch.cat(
        [scalar.reply_scores(torch.tensor([row]), torch.ones(1, len(row)).long()) for row in rows]
    )
    for result, score in zip(results, scores, strict=True):
        torch.testing.assert_close(result, results[0], rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(score[:-1], single, rtol=1e-6, atol=1e-6)


def test_a_sequence_that_pairs_share_stands_in_a_batch_once() -> None:
    prompt, best = [7, 8], [9, 10, 4]
    pairs = [
        TokenisedPair(0, prompt, best, [11, 4]),
        TokenisedPair(1, prompt, best, [12, 13, 14, 4]),
    ]
    pairs.append(TokenisedPair(2, prompt, [11, 4], best))
    batch = pair_batch(pairs, 0, CPU, PairBatchConfig(group_prompts=True))
    assert [part.input_ids.shape[0] for part in batch.micro_batches] == [3]
    assert (batch.chosen.tolist(), batch.rejected.tolist()) == ([0, 0, 1], [1, 2, 0])


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.tuples(sequence, sequence, sequence), min_size=2, max_size=6),
    st.integers(2, 4),
    st.booleans(),
)
def test_parts_and_shared_sequences_change_neither_loss_nor_gradient(
    scalar, rows, count, share
) -> None:  # type: ignore[no-untyped-def]
    pairs = [
        TokenisedPair(i, *row) for i, row in enumerate([*rows, rows[0], (rows[0][0], *rows[1][1:])])
    ]
    totals = StepTotals(len(pairs), sum(len(pair.chosen) for pair in pairs))
    margins = torch.linspace(-1, 1, len(pairs), dtype=torch.float64)
    batch, apart = PairBatchConfig(group_prompts=share), PairBatchConfig()
    lengths = pair_sequences(pairs, share).lengths
    parts = partitions(lengths, min(count, len(lengths)))[-1].micro_batches
    measured = []
    for used, micro_batches in (
        (batch, None),
        (batch, [list(range(len(lengths)))]),
        (batch, parts),
        (apart, None),
    ):
        scalar.zero_grad()
        config = RewardConfig(centering=0.3, imitation=0.7, batch=used)
        loss, metrics = pair_loss(scalar, pairs, margins, config, 0, totals, micro_batches)
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in scalar.parameters() if p.grad is not None])
        measured.append((loss.detach(), gradient, read_scalars([metrics])[0]))
    scalar.zero_grad()
    each = [
        pair_loss(scalar, [p], margins[i : i + 1], config, 0, totals)[0].item()
        for i, p in enumerate(pairs)
    ]
    assert sum(each) == pytest.approx(measured[0][0].item(), rel=1e-5)
    assert measured[0][2]["margin"] == pytest.approx(
        score_pairs(scalar, pairs, 0).margins.mean(), abs=1e-5
    )
    assert torch.equal(measured[0][0], measured[1][0]) and torch.equal(
        measured[0][1], measured[1][1]
    )
    for loss, gradient, metrics in measured[2:]:
        torch.testing.assert_close(loss, measured[0][0], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(gradient, measured[0][1], rtol=1e-4, atol=1e-6)
        assert metrics == pytest.approx(measured[0][2], rel=1e-5, abs=1e-6)


def test_a_tie_counts_half_in_the_accuracy_of_a_step(scalar) -> None:  # type: ignore[no-untyped-def]
    won, lost = [9, 10, 4], [11, 4]
    if float(score_pairs(scalar, [TokenisedPair(0, [7, 8], won, lost)], 0).margins[0]) < 0:
        won, lost = lost, won
    for chosen, rejected, accuracy in (
        (won, lost, 1.0),
        (lost, won, 0.0),
        (won, won, 0.5),
        (lost, lost, 0.5),
    ):
        pair = TokenisedPair(0, [7, 8], chosen, rejected)
        _, metrics = pair_loss(scalar, [pair], None, RewardConfig(), 0, StepTotals(1, len(chosen)))
        assert float(metrics["accuracy"]) == accuracy


def test_a_sequence_that_pairs_share_is_scored_once_and_rewards_keep_their_order(
    scalar, monkeypatch
) -> None:  # type: ignore[no-untyped-def]
    prompt, best, long = [7, 8], [9, 10, 4], [11, 12, 13, 14, 15, 16, 4]
    pairs = [
        TokenisedPair(0, prompt, best, long),
        TokenisedPair(1, prompt, best, [17, 4]),
        TokenisedPair(2, [7], best, long),
    ]
    passed: list[list[int]] = []
    forward = type(scalar).reply_scores

    def counted(self, ids, mask, reply_mask):  # type: ignore[no-untyped-def]
        passed.extend(row[keep.bool()].tolist() for row, keep in zip(ids, mask, strict=True))
        return forward(self, ids, mask, reply_mask)

    monkeypatch.setattr(type(scalar), "reply_scores", counted)
    scores = score_pairs(scalar, pairs, 0)
    assert len(passed) == 5 and len({tuple(row) for row in passed}) == 5
    assert scores.chosen[0] == scores.chosen[1] != scores.chosen[2]
    for pair, chosen, rejected in zip(pairs, scores.chosen, scores.rejected, strict=True):
        for reply, score in ((pair.chosen, chosen), (pair.rejected, rejected)):
            ids = torch.tensor([[*pair.prompt, *reply]])
            assert score == pytest.approx(
                forward(scalar, ids, torch.ones_like(ids)).item(), abs=1e-5
            )


def test_the_imitation_term_reads_chosen_replies_only(scalar) -> None:  # type: ignore[no-untyped-def]
    def imitation(rejected: list[int]) -> float:
        pairs = [TokenisedPair(0, [7, 8], [9, 10, 4], rejected)]
        _, metrics = pair_loss(scalar, pairs, None, RewardConfig(), 0, StepTotals(1, 3))
        return float(metrics["imitation_loss"])

    assert imitation([11, 4]) == pytest.approx(imitation([12, 13, 14, 15, 4]), rel=1e-6)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(2, 60), min_size=1, max_size=80),
    st.integers(1, 16),
    st.integers(0, 2**63 - 1),
)
def test_batches_are_a_function_of_seed_and_step(lengths: list[int], size: int, seed: int) -> None:
    plan = LengthBucketedBatches(lengths, size, seed)
    steps = [plan.at(step) for step in range(2 * plan.per_epoch)]
    epoch = [row for batch in steps[: plan.per_epoch] for row in batch]
    assert len(set(epoch)) == len(epoch) == plan.per_epoch * plan.size
    last = 2 * plan.per_epoch - 1
    assert LengthBucketedBatches(lengths, size, seed).at(last) == steps[last]


def unshared_pairs(differences: list[int]) -> list[TokenisedPair]:
    """Pairs of prompts of their own, each 20 tokens wide, by length of the chosen minus the
    rejected reply.
    """
    lengths = [(18 + min(d, 0), 18 - max(d, 0)) for d in differences]
    return [TokenisedPair(i, [i, 5], [6] * a, [7] * b) for i, (a, b) in enumerate(lengths)]


@pytest.mark.parametrize("group_prompts", [False, True])
def test_pair_batches_are_a_function_of_the_step(group_prompts: bool) -> None:
    config = RewardConfig(
        length_balance="sampling",
        batch=PairBatchConfig(
            token_budget=160, max_pairs=4, min_pairs=4, group_prompts=group_prompts
        ),
    )

    def batches() -> PairBatches:
        return PairBatches(unshared_pairs([1] * 40 + [-1] * 10 + [0] * 3), config, "reward")

    planned = batches()
    walked = [planned.at(step) for step in range(12)]
    assert [len(batch) for batch in walked[:6]].count(4) == 5, (
        "23 pairs make an epoch of 5 full batches and a rest"
    )
    epochs = [{row for batch in walked[start : start + 6] for row in batch} for start in (0, 6)]
    for epoch in epochs:
        assert {*range(40, 53)} < epoch and len(epoch) == 23
    assert epochs[0] != epochs[1], "the commoner kind is drawn anew"
    assert batches().at(11) == walked[11] and planned.at(0) == walked[0]
