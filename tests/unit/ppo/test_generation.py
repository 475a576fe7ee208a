"""The sampler's log-probabilities and filters (traps 1 and 2); rollouts are in
sampling/test_samplers.py.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from real_templates import REAL_TEMPLATES
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig
from unit.ppo.tiny import EOS, PAD, Tiny

from rlhf_core.config.model import SamplingConfig
from rlhf_core.config.ppo import RolloutConfig
from rlhf_core.errors import RlhfError
from rlhf_core.models.causal_lm import train_tokenizer
from rlhf_core.ppo.experience import Experience
from rlhf_core.ppo.kl import kl_estimate
from rlhf_core.ppo.rollout import logprob_differences, predict_tokens, require_agreement
from rlhf_core.sampling.distribution import (
    CHUNK,
    FORBIDDEN,
    LARGEST_IN_ONE_STEP,
    NOT_DRAWN,
    EvaluationSampling,
    Sampling,
    TokenDistribution,
    inverse_cdf,
    log_distribution,
    log_distribution_at,
    philox_uniforms,
)
from rlhf_core.sampling.generation import Rollout, generate
from rlhf_core.sampling.sampler import LocalSampler, PromptBatch, sample_replies
from rlhf_core.sampling.token_scoring import (
    Tokens,
    entropy,
    full_kl,
    gather_logprobs,
    response_logits,
    token_statistics,
)


def sample(tiny: Tiny, sampling: Sampling | None = None, rows: list[int] | None = None) -> Rollout:
    rows = list(range(12)) if rows is None else rows
    used = sampling or tiny.sampling
    uniforms = philox_uniforms(11, rows, used.max_new_tokens)
    return generate(tiny.policy, [tiny.prompts[i] for i in rows], uniforms, used)


def predict(
    tiny: Tiny, rollout: Rollout, sampling: Sampling, micro_batch_size: int | None
) -> Experience:
    return predict_tokens(tiny.untrained_pair(sampling, micro_batch_size), tiny.reference, rollout)


def compared(rollout: Rollout, scored: Experience) -> dict[str, float]:
    """Sampler against trainer, by the limits of float32."""
    return logprob_differences(
        rollout.logprobs, scored.policy_logprobs, rollout.response_mask, "float32"
    )


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("minimum", [0, 3])
def test_sampler_and_trainer_agree(tiny: Tiny, temperature: float, minimum: int) -> None:
    """Trap 1: temperature and minimum length go into both the sampler and every later scoring."""
    sampling = Sampling(EOS, PAD, 7, temperature, minimum)
    rollout = sample(tiny, sampling)
    assert min(map(len, rollout.replies())) > minimum or minimum == 0
    scored = predict(tiny, rollout, sampling, 3)
    agreement = compared(rollout, scored)
    require_agreement(agreement, "float32")
    assert agreement["sampler_gap"] < 1e-4


@pytest.mark.parametrize(
    ("sampled", "scored_by"),
    [
        (Sampling(EOS, PAD, 7), Sampling(EOS, PAD, 7, 1.3)),
        (Sampling(EOS, PAD, 7), Sampling(EOS, PAD, 7, 1.0, 3)),
        (EvaluationSampling(Sampling(EOS, PAD, 7), top_p=0.5), Sampling(EOS, PAD, 7)),
    ],
    ids=["temperature", "minimum length", "filters of an evaluation"],
)
def test_another_distribution_is_noticed(
    tiny: Tiny, sampled: TokenDistribution, scored_by: Sampling
) -> None:
    rollout = generate(tiny.policy, tiny.prompts[:12], philox_uniforms(11, range(12), 7), sampled)
    scored = predict(tiny, rollout, scored_by, None)
    with pytest.raises(RlhfError, match="not the one that is scored"):
        require_agreement(compared(rollout, scored), "float32")


def test_weights_that_are_not_finite_are_noticed() -> None:
    nan = torch.full((1, 1), float("nan"))
    agreement = logprob_differences(nan, nan, torch.ones(1, 1, dtype=torch.bool), "float32")
    with pytest.raises(RlhfError, match="weights are finite"):
        require_agreement(agreement, "float32")


def test_pad_equal_to_eos_changes_nothing(tiny: Tiny) -> None:
    """Trap 2: masks come from lengths, so the padding token may be anything, the end marker
    included.
    """
    usual, same = sample(tiny), sample(tiny, dataclasses.replace(tiny.sampling, pad_id=EOS))
    assert usual.replies() == same.replies()
    assert torch.equal(usual.response_mask, same.response_mask)
    assert torch.allclose(usual.logprobs, same.logprobs, atol=1e-5)
    for part in ("policy_logprobs", "ref_logprobs", "values", "entropy"):
        first = getattr(predict(tiny, usual, tiny.sampling, None), part)
        second = getattr(predict(tiny, same, tiny.sampling, 5), part)
        assert torch.allclose(first, second, atol=1e-5)


def test_padding_side_changes_no_logprob(tiny: Tiny) -> None:
    """Left-padded in a batch, or alone without any padding: the same numbers."""
    rollout = sample(tiny)
    scored = predict(tiny, rollout, tiny.sampling, None)
    for row, reply in enumerate(rollout.replies()):
        ids = torch.tensor([tiny.prompts[row] + reply])
        alone = Tokens(ids, torch.ones_like(ids), torch.ones(1, len(reply), dtype=torch.bool))
        with torch.inference_mode():
            tokens = token_statistics(response_logits(tiny.policy, alone), alone, tiny.sampling)
            score = tiny.reward.reply_scores(alone.tokens, alone.attention_mask)
        assert torch.allclose(
            tokens["logprobs"][0], scored.policy_logprobs[row, : len(reply)], atol=1e-5
        )
        batched = tiny.reward_fn(rollout.batch)
        assert torch.allclose(score, batched[row : row + 1], atol=1e-5)


def test_samples_follow_the_distribution(tiny: Tiny) -> None:
    logits = torch.tensor([[2.0, 0.0, -1.0, 1.0]])
    probabilities = logits.softmax(1)[0]
    uniforms = torch.linspace(0, 1, 20001, dtype=torch.float64)[:-1]
    picked = inverse_cdf(torch.log_softmax(logits, 1).expand(len(uniforms), -1), uniforms)
    assert torch.allclose(picked.bincount(minlength=4) / len(uniforms), probabilities, atol=1e-3)


LARGE = LARGEST_IN_ONE_STEP + 3 * CHUNK + 77  # its last chunk is no whole one


def large_distribution(kind: str) -> Tensor:
    """Log-probabilities (1, V) of a large vocabulary."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, LARGE, generator=generator)
    logits *= {"flat": 0.01, "usual": 3.0, "peaked": 12.0}.get(kind, 1.0)
    allowed = torch.ones(LARGE, dtype=torch.bool)
    if kind == "few chunks":
        allowed[:] = False
        allowed[5 * CHUNK - 3 : 5 * CHUNK + 3] = True
    if kind == "forbidden ends":
        allowed[: 2 * CHUNK] = False
        allowed[-CHUNK:] = False
    return torch.log_softmax(logits.masked_fill(~allowed, FORBIDDEN), dim=1)


@pytest.mark.parametrize("kind", ["flat", "usual", "peaked", "few chunks", "forbidden ends"])
def test_a_large_vocabulary_is_drawn_from_as_exact_numbers_say(kind: str) -> None:
    log_probabilities = large_distribution(kind)
    exact = log_probabilities.double().exp()[0]
    cumulative = exact.cumsum(0)
    generator = torch.Generator().manual_seed(1)
    uniforms = torch.rand(400, generator=generator, dtype=torch.float64)
    uniforms[:2] = torch.tensor([0.0, 1 - 2.0**-53])
    picked = inverse_cdf(log_probabilities.expand(400, -1), uniforms)
    assert picked.dtype == torch.int64 and (exact[picked] > 0).all()
    thresholds = uniforms * cumulative[-1]
    # Within float32's rounding of a chunk's probability, each threshold lies in its token's share.
    assert (thresholds < cumulative[picked] + 1e-6).all()
    assert (thresholds >= cumulative[picked] - exact[picked] - 1e-6).all()
    expected = torch.searchsorted(cumulative, thresholds, right=True)
    assert (picked == expected).float().mean() >= (0.95 if kind == "flat" else 0.99)


def test_a_small_vocabulary_is_drawn_from_in_float64_to_the_last_bit() -> None:
    log_probabilities = large_distribution("usual")[:, :LARGEST_IN_ONE_STEP]
    uniforms = torch.rand(50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    cumulative = log_probabilities.double().exp().cumsum(1)[0]
    expected = torch.searchsorted(cumulative, uniforms * cumulative[-1], right=True)
    assert torch.equal(inverse_cdf(log_probabilities.expand(50, -1), uniforms), expected)


class Doubles(TorchDispatchMode):
    """Notes the elements of the largest float64 tensor that is made in the block."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.dtype == torch.float64:
            self.largest = max(self.largest, made.numel())
        return made


def test_no_row_of_a_large_vocabulary_is_copied_to_float64() -> None:
    log_probabilities = large_distribution("usual").expand(4, -1)
    with Doubles() as doubles:
        inverse_cdf(log_probabilities, torch.full((4,), 0.5, dtype=torch.float64))
    assert doubles.largest == 4 * CHUNK


def test_weights_that_are_not_finite_draw_a_token_of_the_vocabulary() -> None:
    picked = inverse_cdf(
        torch.full((2, LARGE), float("nan")), torch.tensor([0.1, 0.9], dtype=torch.float64)
    )
    assert ((picked >= 0) & (picked < LARGE)).all()


def test_no_stop_token_is_drawn_before_the_minimum_length() -> None:
    sampling = Sampling(eos_id=0, pad_id=0, max_new_tokens=4, min_new_tokens=2, other_stop_ids=(2,))
    dist = log_distribution(torch.zeros(1, 4, 4), sampling)
    assert inverse_cdf(dist[:, 0], torch.zeros(1, dtype=torch.float64)).item() == 1
    later = log_distribution_at(torch.zeros(1, 1, 4), torch.tensor([2]), sampling)
    assert dist[0].exp().tolist() == [[0, 0.5, 0, 0.5]] * 2 + [[0.25] * 4] * 2
    assert later[0].exp().tolist() == [[0.25] * 4]


def test_the_stop_tokens_are_those_of_the_chat_template() -> None:
    qwen = next(real for real in REAL_TEMPLATES if real.name == "qwen-2.5-base")
    sampling = Sampling.for_tokenizer(qwen.tokenizer, 5)
    assert qwen.tokenizer.convert_ids_to_tokens(list(sampling.stop_ids)) == [
        "<|im_end|>",
        "<|endoftext|>",
    ]
    assert sampling.eos_id == qwen.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert sampling.forbidden_ids == (qwen.tokenizer.convert_tokens_to_ids("<|im_start|>"),)


def favouring(tiny: Tiny, ids: list[int]) -> Tiny:
    """A policy that writes ``ids`` far more often than anything else: they are read as the likely
    end marker is.
    """
    with torch.no_grad():
        tiny.policy.lm_head.weight[ids] = tiny.policy.lm_head.weight[EOS] * 20.0
    return tiny


def test_special_tokens_are_forbidden_and_the_end_marker_is_not() -> None:
    tokenizer = train_tokenizer(["some text to write"], 300)
    tokenizer.add_tokens(["<think>"])  # written as text, so a reply may contain it
    tokenizer.add_tokens(["<|tool|>"], special_tokens=True)
    sampling = Sampling.for_rollouts(
        tokenizer, RolloutConfig(max_new_tokens=5, temperature=0.7, min_new_tokens=2)
    )
    names = ["<|pad|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>"]
    assert sampling.forbidden_ids == tuple(sorted(tokenizer.convert_tokens_to_ids(names)))
    assert (
        sampling.eos_id == tokenizer.convert_tokens_to_ids("<|end|>") not in sampling.forbidden_ids
    )
    assert sampling.vocabulary_size == len(tokenizer)
    assert (sampling.max_new_tokens, sampling.temperature, sampling.min_new_tokens) == (5, 0.7, 2)


def test_evaluation_forbids_the_same_tokens() -> None:
    tokenizer = train_tokenizer(["some text to write"], 300)
    config = SamplingConfig(temperature=0.5, top_p=0.6, repetition_penalty=1.3, max_new_tokens=9)
    sampling = EvaluationSampling.for_tokenizer(tokenizer, config)
    assert sampling.base == Sampling.for_tokenizer(tokenizer, 9, 0.5)
    assert (sampling.top_p, sampling.repetition_penalty) == (0.6, 1.3)


def test_padding_and_role_tokens_are_never_sampled_by_a_policy_that_wants_them(tiny: Tiny) -> None:
    """And the trainer scores the replies under the very distribution that they were sampled
    from.
    """
    wanted = [PAD, 5, 6]
    eager = favouring(tiny, wanted)
    free = sample(eager)
    assert {token for reply in free.replies() for token in reply} & set(wanted)
    sampling = dataclasses.replace(tiny.sampling, forbidden_ids=tuple(wanted), vocabulary_size=20)
    uniforms, filtered = philox_uniforms(11, range(12), 7), EvaluationSampling(sampling, 0.9, 1.2)
    for rollout in (
        sample(eager, sampling),
        generate(eager.policy, eager.prompts[:12], uniforms, filtered),
    ):
        written = {token for reply in rollout.replies() for token in reply}
        assert written and not written & set(wanted) and max(written) < 20
    rollout = sample(eager, sampling)
    scored = predict(eager, rollout, sampling, 3)
    assert compared(rollout, scored)["sampler_gap"] < 1e-4
    columns = (
        scored.policy_logprobs,
        scored.ref_logprobs,
        scored.entropy,
        scored.values,
        scored.full_kl,
    )
    assert all(bool(column.isfinite().all()) for column in columns)


def test_kl_and_entropy_are_those_of_the_allowed_tokens_alone() -> None:
    """Policy and reference mask the same ids, so every figure equals that of a vocabulary without
    them.
    """
    sampling = Sampling(
        eos_id=1, pad_id=0, max_new_tokens=4, forbidden_ids=(0, 3), vocabulary_size=5
    )
    kept = [1, 2, 4]
    logits, other = torch.randn(
        2, 1, 2, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    logits.requires_grad_()
    policy, reference = log_distribution(logits, sampling), log_distribution(other, sampling)
    small, small_reference = (torch.log_softmax(x[..., kept], -1) for x in (logits, other))
    torch.testing.assert_close(policy[..., kept], small)
    torch.testing.assert_close(full_kl(policy, reference), full_kl(small, small_reference))
    torch.testing.assert_close(entropy(policy), entropy(small))
    written = torch.tensor([[2, 4]])
    k1 = kl_estimate(gather_logprobs(policy, written), gather_logprobs(reference, written), "k1")
    expected = gather_logprobs(small - small_reference, torch.tensor([[1, 2]]))
    torch.testing.assert_close(k1, expected)
    (full_kl(policy, reference).sum() + entropy(policy).sum()).backward()
    assert logits.grad is not None and bool(logits.grad.isfinite().all())
    assert bool((logits.grad[..., [0, 3, 5]] == 0).all()) and bool(
        (logits.grad[..., kept] != 0).any()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_models_logits_are_left_as_they_are(dtype: torch.dtype, temperature: float) -> None:
    logits = torch.randn(2, 3, 5).to(dtype)
    before = logits.clone()
    sampling = Sampling(1, 0, 4, temperature, min_new_tokens=1, forbidden_ids=(0,))
    dist = log_distribution(logits, sampling)
    assert torch.equal(logits, before) and dist.dtype == torch.float32
    assert (
        bool((dist[..., 0] < -1e8).all())
        and bool((dist[:, 0, 1] < -1e8).all())
        and float(dist[0, 1, 1]) > -1e3
    )


def test_top_p_keeps_the_smallest_sufficient_set() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    filtered = EvaluationSampling(Sampling(9, 9, 4), top_p=0.7)
    kept = filtered.next_token(logits, torch.zeros(1, 0, dtype=torch.long), torch.tensor([0])).exp()
    assert torch.allclose(kept, torch.tensor([[0.625, 0.375, 0.0, 0.0]]), atol=1e-6)


def test_repetition_penalty_by_hand() -> None:
    filtered = EvaluationSampling(Sampling(9, 9, 4), repetition_penalty=2.0)
    logits = torch.tensor([[1.0, -1.0, 1.0]])
    got = filtered.next_token(logits, torch.tensor([[0, 1, NOT_DRAWN]]), torch.tensor([2]))
    assert torch.allclose(got, torch.log_softmax(torch.tensor([[0.5, -2.0, 1.0]]), 1))


def test_repetition_penalty_counts_generated_tokens_only() -> None:
    """The paper's penalty is "based on previously generated tokens": a prompt with every token in
    it changes nothing.

    All four tokens have a logit of 50, which the penalty brings to nearly 0: no token is drawn
    twice before all were.
    """

    class Uniform(torch.nn.Module):
        device, config = torch.device("cpu"), LlamaConfig(num_hidden_layers=1)

        def forward(self, input_ids: torch.Tensor, **_: Any) -> SimpleNamespace:
            return SimpleNamespace(
                logits=torch.full((len(input_ids), 1, 4), 50.0), past_key_values=SimpleNamespace()
            )

    sampling = EvaluationSampling(
        Sampling(eos_id=9, pad_id=0, max_new_tokens=4), repetition_penalty=1e4
    )
    uniforms = torch.tensor([[0.1, 0.1, 0.1, 0.1], [0.9, 0.1, 0.9, 0.1]], dtype=torch.float64)
    model: Any = Uniform()
    fresh = generate(model, [[2], [2]], uniforms, sampling).replies()
    primed = generate(model, [[2], [0, 1, 3, 3]], uniforms, sampling).replies()
    assert primed == fresh == [[0, 1, 2, 3], [3, 0, 2, 1]]


def test_a_model_that_another_thread_loads_changes_no_reply(tiny: Tiny) -> None:
    batch = PromptBatch(tiny.prompts[:12], range(12), 11)
    expected = sample_replies(LocalSampler.of(tiny.policy), 0, batch, tiny.sampling)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)  # as from_pretrained does for the whole process
        replies = sample_replies(LocalSampler.of(tiny.policy), 0, batch, tiny.sampling)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(replies.tokens, expected.tokens)
    assert replies.logprobs.dtype == torch.float32 and torch.equal(
        replies.logprobs, expected.logprobs
    )
