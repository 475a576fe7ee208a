"""The sampler: its log-probabilities, its independence of batching, masks and filters (traps 1 and 2)."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from unit.ppo.tiny import EOS, PAD, VOCABULARY, Tiny

from rlhf_core.config.model import SamplingConfig
from rlhf_core.errors import RlhfError
from rlhf_core.ppo.rollout import check_sampler, sample_together, score_tokens
from rlhf_core.sampling.distribution import (
    Sampling,
    evaluation_distribution,
    inverse_cdf,
    log_distribution,
    philox_uniforms,
)
from rlhf_core.sampling.generation import Rollout, evaluation_generate, generate
from rlhf_core.sampling.token_scoring import Tokens, gather_logprobs, response_log_distribution


def sample(tiny: Tiny, sampling: Sampling | None = None, rows: list[int] | None = None) -> Rollout:
    rows = list(range(12)) if rows is None else rows
    used = sampling or tiny.sampling
    uniforms = philox_uniforms(11, rows, used.max_new_tokens)
    return generate(tiny.policy, [tiny.prompts[i] for i in rows], uniforms, used)


def test_masks_follow_the_end_marker(tiny: Tiny) -> None:
    rollout = sample(tiny)
    assert rollout.finished.any() and not rollout.finished.all() and len(set(rollout.lengths.tolist())) > 2
    for reply, finished, mask in zip(rollout.replies(), rollout.finished, rollout.response_mask, strict=True):
        assert (reply[-1] == EOS) == bool(finished)
        assert EOS not in reply[:-1]
        assert mask.tolist() == [i < len(reply) for i in range(len(mask))]
        assert finished or len(reply) == tiny.sampling.max_new_tokens
    width = rollout.response_mask.shape[1]
    assert torch.equal(rollout.attention_mask[:, -width:].bool(), rollout.response_mask)
    assert (rollout.logprobs[~rollout.response_mask] == 0).all()


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("minimum", [0, 3])
def test_sampler_and_trainer_agree(tiny: Tiny, temperature: float, minimum: int) -> None:
    """Trap 1: temperature and minimum length go into both the sampler and every later scoring."""
    sampling = Sampling(EOS, PAD, 7, temperature, minimum)
    rollout = sample(tiny, sampling)
    assert int(rollout.lengths.min()) > minimum or minimum == 0
    scored = score_tokens(tiny.actors, rollout, sampling, 3)
    gap = check_sampler(rollout.logprobs, scored.policy_logprobs, rollout.response_mask, torch.float32)
    assert gap < 1e-4


@pytest.mark.parametrize(
    "wrong", [Sampling(EOS, PAD, 7, 1.3), Sampling(EOS, PAD, 7, 1.0, 3)], ids=["temperature", "minimum length"]
)
def test_another_distribution_is_noticed(tiny: Tiny, wrong: Sampling) -> None:
    rollout = sample(tiny)
    scored = score_tokens(tiny.actors, rollout, wrong, None)
    with pytest.raises(RlhfError, match="not the one that is scored"):
        check_sampler(rollout.logprobs, scored.policy_logprobs, rollout.response_mask, torch.float32)


def test_evaluation_filters_are_noticed_as_another_distribution(tiny: Tiny) -> None:
    config = SamplingConfig(temperature=1.0, top_p=0.5, repetition_penalty=1.0, max_new_tokens=7)
    uniforms = philox_uniforms(11, range(12), 7)
    rollout = evaluation_generate(tiny.policy, tiny.prompts[:12], uniforms, config, EOS, PAD)
    scored = score_tokens(tiny.actors, rollout, tiny.sampling, None)
    with pytest.raises(RlhfError, match="log-probabilities"):
        check_sampler(rollout.logprobs, scored.policy_logprobs, rollout.response_mask, torch.float32)


def test_weights_that_are_not_finite_are_noticed() -> None:
    nan = torch.full((1, 1), float("nan"))
    with pytest.raises(RlhfError):
        check_sampler(nan, nan, torch.ones(1, 1, dtype=torch.bool), torch.float32)


def test_batching_changes_nothing(tiny: Tiny) -> None:
    """A prompt's reply is a function of its stream, whatever shares its batch; padding has no say."""
    whole = sample(tiny).replies()
    assert [sample(tiny, rows=[i]).replies()[0] for i in range(12)] == whole
    assert sample(tiny, rows=list(range(11, -1, -1))).replies() == whole[::-1]


def test_pad_equal_to_eos_changes_nothing(tiny: Tiny) -> None:
    """Trap 2: masks come from lengths, so the padding token may be anything, the end marker included."""
    usual, same = sample(tiny), sample(tiny, dataclasses.replace(tiny.sampling, pad_id=EOS))
    assert usual.replies() == same.replies()
    assert torch.equal(usual.response_mask, same.response_mask)
    assert torch.allclose(usual.logprobs, same.logprobs, atol=1e-5)
    for part in ("policy_logprobs", "ref_logprobs", "values", "entropy"):
        first = getattr(score_tokens(tiny.actors, usual, tiny.sampling, None), part)
        second = getattr(score_tokens(tiny.actors, same, tiny.sampling, 5), part)
        assert torch.allclose(first, second, atol=1e-5)


def test_padding_side_changes_no_logprob(tiny: Tiny) -> None:
    """Left-padded in a batch, or alone without any padding: the same numbers."""
    rollout = sample(tiny)
    scored = score_tokens(tiny.actors, rollout, tiny.sampling, None)
    for row, reply in enumerate(rollout.replies()):
        ids = torch.tensor([tiny.prompts[row] + reply])
        alone = Tokens(ids, torch.ones_like(ids), torch.ones(1, len(reply), dtype=torch.bool))
        with torch.inference_mode():
            dist = response_log_distribution(tiny.policy, alone, tiny.sampling)
            score = tiny.reward.last_token_scores(alone.tokens, alone.attention_mask)
        assert torch.allclose(
            gather_logprobs(dist, alone.response)[0], scored.policy_logprobs[row, : len(reply)], atol=1e-5
        )
        batched = tiny.actors.score(Tokens(rollout.tokens, rollout.attention_mask, rollout.response_mask))
        assert torch.allclose(score, batched[row : row + 1], atol=1e-5)


def test_samples_follow_the_distribution(tiny: Tiny) -> None:
    logits = torch.tensor([[2.0, 0.0, -1.0, 1.0]])
    probabilities = logits.softmax(1)[0]
    uniforms = torch.linspace(0, 1, 20001, dtype=torch.float64)[:-1]
    picked = inverse_cdf(torch.log_softmax(logits, 1).expand(len(uniforms), -1), uniforms)
    assert torch.allclose(picked.bincount(minlength=4) / len(uniforms), probabilities, atol=1e-3)


def test_forbidden_tokens_are_never_drawn() -> None:
    sampling = Sampling(eos_id=0, pad_id=0, max_new_tokens=4, min_new_tokens=2)
    dist = log_distribution(torch.zeros(1, 4, 3), sampling)
    assert inverse_cdf(dist[:, 0], torch.zeros(1, dtype=torch.float64)).item() == 1
    assert dist[0, 1, 0] < -1e8 and dist[0, 2, 0] > -2
    later = log_distribution(torch.zeros(1, 1, 3), sampling, first=2)
    assert later[0, 0, 0] > -2


def test_uniforms_depend_on_seed_and_stream_alone() -> None:
    both = philox_uniforms(5, [3, 9], 6)
    assert torch.equal(both[1:], philox_uniforms(5, [9], 6))
    assert not torch.equal(both[0], both[1])
    assert not torch.equal(both, philox_uniforms(6, [3, 9], 6))


def test_top_p_keeps_the_smallest_sufficient_set() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    config = SamplingConfig(temperature=1.0, top_p=0.7, repetition_penalty=1.0)
    kept = evaluation_distribution(logits, torch.zeros(1, 0, dtype=torch.long), torch.zeros(1, 0), config).exp()
    assert torch.allclose(kept, torch.tensor([[0.625, 0.375, 0.0, 0.0]]), atol=1e-6)


def test_repetition_penalty_reads_real_tokens_only() -> None:
    config = SamplingConfig(temperature=1.0, top_p=1.0, repetition_penalty=2.0)
    logits = torch.tensor([[1.0, -1.0, 1.0]])
    got = evaluation_distribution(logits, torch.tensor([[0, 1, 2]]), torch.tensor([[1, 1, 0]]), config)
    assert torch.allclose(got, torch.log_softmax(torch.tensor([[0.5, -2.0, 1.0]]), 1))


def test_a_batch_of_one_long_reply(tiny: Tiny) -> None:
    sampling = Sampling(eos_id=VOCABULARY + 5, pad_id=PAD, max_new_tokens=5)
    rollout = sample(tiny, sampling, [0])
    assert rollout.response_mask.shape == (1, 5) and not rollout.finished.any()


@pytest.mark.parametrize("at_once", [1, 5, 12, 40])
def test_sampling_a_few_prompts_at_a_time_gives_the_same_rollout(tiny: Tiny, at_once: int) -> None:
    prompts, streams = tiny.prompts[:12], list(range(12))
    whole = sample_together(tiny.policy, prompts, streams, 11, tiny.sampling)
    parts = sample_together(tiny.policy, prompts, streams, 11, tiny.sampling, at_once)
    assert len(set(whole.lengths.tolist())) > 2
    for name in ("tokens", "attention_mask", "response_mask", "finished"):
        assert torch.equal(getattr(parts, name), getattr(whole, name)), name
    torch.testing.assert_close(parts.logprobs, whole.logprobs)
