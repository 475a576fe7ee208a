"""Chunks of positions: the numbers and gradients of the computation as a whole, in bounded
memory.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import Gemma2Config, Gemma2ForCausalLM
from unit.ppo.tiny import (
    PAD,
    Tiny,
    accumulate_gradients,
    collect,
    make_config,
    make_learner,
    make_tiny,
)

from rlhf_core.config.model import LoraConfig
from rlhf_core.models.adapters import WithoutAdapters, add_adapters
from rlhf_core.models.forward import LazyLogits, chunk_count
from rlhf_core.models.precision import float32_linear
from rlhf_core.ppo.losses import ptx_loss_sum
from rlhf_core.ppo.update import measure_minibatch
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.sampling.token_scoring import Tokens, response_logits, token_statistics
from rlhf_core.training.losses import chunked_cross_entropy
from rlhf_extras.memory.dry_run import TensorMemory

HIDDEN, VOCABULARY = 5, 11
WHOLE = 1 << 30


def leaf(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def replies(generator: torch.Generator, lengths: list[int]) -> Tokens:
    rows, width = len(lengths), max(lengths)
    ids = torch.randint(2, VOCABULARY - 1, (rows, 2 + width), generator=generator)
    mask = torch.arange(width).unsqueeze(0) < torch.tensor(lengths).unsqueeze(1)
    return Tokens(ids, torch.nn.functional.pad(mask.long(), (2, 0), value=1), mask)


def weighted(statistics: dict[str, Tensor], mask: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Each statistic at real tokens, and a sum in which every token of each counts differently."""
    kept = {name: torch.where(mask, values, 0.0) for name, values in statistics.items()}
    weights = torch.linspace(0.5, 1.5, mask.numel(), dtype=torch.float64).view(mask.shape)
    total = torch.stack(
        [(number * weights * values).sum() for number, values in enumerate(kept.values(), 1)]
    ).sum()
    return kept, total


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.integers(1, 12),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0, 2]),
    st.integers(0, 99),
)
def test_chunks_have_the_values_and_gradients_of_the_whole(
    lengths: list[int], positions: int, entropies: bool, with_reference: bool, early: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    batch = replies(generator, lengths)
    shape = (len(lengths), batch.width + 1, HIDDEN)
    states, weight, other = (
        leaf(generator, *shape),
        leaf(generator, VOCABULARY, HIDDEN),
        leaf(generator, *shape),
    )
    frozen = leaf(generator, VOCABULARY, HIDDEN)
    sampling = Sampling(
        1, 0, batch.width, 0.7, early, forbidden_ids=(0,), vocabulary_size=VOCABULARY - 1
    )
    logits = LazyLogits(states, lambda part: part @ weight.T, VOCABULARY)
    reference = (
        LazyLogits(other, lambda part: part @ frozen.T, VOCABULARY) if with_reference else None
    )
    results = []
    for limit in (WHOLE, 4 * VOCABULARY * positions):
        scored = token_statistics(
            logits, batch, sampling, limit, entropies=entropies, reference=reference
        )
        values, total = weighted(scored, batch.response_mask)
        results.append((values, torch.autograd.grad(total, (states, weight))))
    (whole, whole_gradients), (chunked, gradients) = results
    assert whole.keys() == chunked.keys()
    for name, values in whole.items():
        torch.testing.assert_close(chunked[name], values, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients, whole_gradients, rtol=1e-10, atol=1e-12)


def test_gradients_of_chunks_are_those_of_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    batch = replies(generator, [3, 1])
    states, weight = leaf(generator, 2, 4, HIDDEN), leaf(generator, VOCABULARY, HIDDEN)
    frozen = leaf(generator, VOCABULARY, HIDDEN).detach()
    reference = LazyLogits(
        leaf(generator, 2, 4, HIDDEN).detach(), lambda part: part @ frozen.T, VOCABULARY
    )
    sampling, limit = Sampling(1, 0, 3, 1.3), 4 * VOCABULARY * 2

    def total(states: Tensor, weight: Tensor) -> Tensor:
        logits = LazyLogits(states, lambda part: part @ weight.T, VOCABULARY)
        scored = token_statistics(
            logits, batch, sampling, limit, entropies=True, reference=reference
        )
        return weighted(scored, batch.response_mask)[1]

    torch.autograd.gradcheck(total, (states, weight))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 17), st.integers(1, 20), st.integers(0, 99))
def test_cross_entropy_in_chunks_is_that_of_the_whole(
    tokens: int, positions: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    states, weight = (
        leaf(generator, tokens, HIDDEN).float(),
        leaf(generator, VOCABULARY, HIDDEN).float(),
    )
    logits = LazyLogits(states, lambda part: part @ weight.T, VOCABULARY)
    targets = torch.randint(0, VOCABULARY, (tokens,), generator=generator)
    losses = [
        chunked_cross_entropy(logits, targets, 3, limit)
        for limit in (WHOLE, 4 * VOCABULARY * positions)
    ]
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-5)
    whole, chunked = (torch.autograd.grad(loss, (states, weight)) for loss in losses)
    torch.testing.assert_close(chunked, whole, rtol=1e-4, atol=1e-6)


def test_the_number_of_chunks_keeps_the_limit() -> None:
    assert chunk_count(1000, 152_000, 256 << 20) == math.ceil(1000 * 152_000 * 4 / (256 << 20)) == 3
    assert chunk_count(7, 152_000, 1) == 7, "a position is never divided"
    assert chunk_count(0, 152_000, 1) == 1


def test_the_reference_of_adapters_is_the_model_without_them(tiny: Tiny) -> None:
    pytest.importorskip("peft")
    batch = collect(tiny, make_config()).batch
    limits = (WHOLE, 4 * 23 * 4)
    with torch.no_grad():
        logits = response_logits(tiny.policy, batch)
        before = [
            token_statistics(logits, batch, tiny.sampling, limit)["logprobs"] for limit in limits
        ]
    add_adapters(tiny.policy, LoraConfig(rank=2), seed=1)
    for name, parameter in tiny.policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    without: Any = WithoutAdapters(tiny.policy)
    for limit, expected in zip(limits, before, strict=True):
        adapted, reference = response_logits(tiny.policy, batch), response_logits(without, batch)
        scored = token_statistics(adapted, batch, tiny.sampling, limit, reference=reference)
        mask = batch.response_mask
        torch.testing.assert_close(scored["ref_logprobs"][mask], expected[mask])
        assert bool((scored["full_kl"][mask] > 1e-3).any())


def test_the_own_reference_is_at_no_distance(tiny: Tiny) -> None:
    batch = collect(tiny, make_config()).batch
    logits = response_logits(tiny.policy, batch)
    scored = token_statistics(
        logits, batch, tiny.sampling, 4 * 23 * 4, entropies=True, reference=logits
    )
    assert torch.equal(scored["ref_logprobs"], scored["logprobs"]) and not scored["full_kl"].any()


def test_a_head_that_does_more_than_unembed_is_scored_from_its_own_logits() -> None:
    config = Gemma2Config(
        vocab_size=23, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, head_dim=8,
        num_key_value_heads=2, final_logit_softcapping=0.5, max_position_embeddings=64, pad_token_id=PAD,
    )  # fmt: skip
    model = Gemma2ForCausalLM(config).eval()
    batch = collect(make_tiny(), make_config()).batch
    logits = response_logits(model, batch)
    assert float(logits.whole().detach().abs().max()) <= 0.5 and logits.states is logits.whole()
    whole, chunked = (
        token_statistics(logits, batch, Sampling(3, 0, 7), n)["logprobs"] for n in (WHOLE, 400)
    )
    torch.testing.assert_close(chunked[batch.response_mask], whole[batch.response_mask])


def test_gradients_of_a_bfloat16_head_are_added_up_in_float32() -> None:
    """In bfloat16 the sum of many chunks would lose what each adds."""
    generator = torch.Generator().manual_seed(0)
    layer = float32_linear(torch.nn.Linear(HIDDEN, VOCABULARY, bias=False).bfloat16())
    states = torch.randn(300, HIDDEN, generator=generator).bfloat16()
    targets = torch.randint(0, VOCABULARY, (300,), generator=generator)
    gradients = []
    for limit in (WHOLE, 4 * VOCABULARY):
        loss = chunked_cross_entropy(LazyLogits(states, layer, VOCABULARY), targets, 300, limit)
        gradients += torch.autograd.grad(loss, layer.weight)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=2**-7, atol=1e-6)


def test_no_tensor_of_all_positions_and_the_vocabulary_exists(tiny: Tiny) -> None:
    """Neither in scoring nor in an update: the largest storage of the vocabulary's width is a chunk
    or the head.
    """
    config = make_config(ptx={"weight": 0.0}, batch_size=8, minibatches=1)
    chunk = 4 * 23 * 4  # bytes of four positions
    learner = make_learner(tiny, config, logits_bytes=chunk)
    largest = LargestLogits(23)
    with largest:
        experience = collect(tiny, config, pair=learner.pair)
        largest.peak = 0
        measure_minibatch(learner.pair, experience)
        accumulate_gradients(learner, experience, 0.2, 0.0)
    assert 0 < largest.peak <= max(chunk, 4 * 23 * 16)  # the head's weight is (23, 16)


class LargestLogits(TensorMemory):
    """Keeps the bytes of the largest tensor whose last dimension is the vocabulary."""

    def _count(self, tensor: Tensor, kind: str) -> None:
        if tensor.shape[-1:] == (self.vocabulary,):
            self.peak = max(self.peak, tensor.nbytes)

    def __init__(self, vocabulary: int) -> None:
        super().__init__(vocabulary=vocabulary)


def test_ptx_in_chunks_is_that_of_the_whole(tiny: Tiny) -> None:
    texts = [([4, 5], [6, 7, 8, 3]), ([], [9, 10, 11]), ([5], [3])]
    losses = [ptx_loss_sum(tiny.policy, texts, PAD, limit) for limit in (WHOLE, 4 * 23 * 2)]
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-5)
    whole, chunked = (torch.autograd.grad(loss, list(tiny.policy.parameters())) for loss in losses)
    torch.testing.assert_close(chunked, whole, rtol=1e-4, atol=1e-6)
