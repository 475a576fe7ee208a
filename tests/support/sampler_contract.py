"""What every sampler keeps, whoever generates: one suite for all implementations of the interface.

Test modules subclass :class:`SamplerContract` and give the fixtures ``policy`` and ``sampler``.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from rlhf_core.errors import RlhfError
from rlhf_core.models.precision import Precision
from rlhf_core.ppo.rollout import logprob_differences, require_agreement
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.sampling.generation import Rollout
from rlhf_core.sampling.sampler import PromptBatch, Sampler, concatenate, sample_replies
from rlhf_core.sampling.token_scoring import response_logits, token_statistics

EOS, OTHER_STOP, PAD, FORBIDDEN, VOCABULARY = 3, 5, 0, (0, 7), 23
SAMPLING = Sampling(EOS, PAD, 9, 0.8, 2, FORBIDDEN, VOCABULARY - 2, (OTHER_STOP,))
PROMPTS = [[*[4, 6, 8][:length], 9 + number % 10] for number, length in enumerate([0, 3, 1, 2] * 4)]


def contract_policy(tied: bool = False) -> LlamaForCausalLM:
    """The same model every time. Its heads have 32 dimensions, the fewest that vLLM has kernels
    for.
    """
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None, initializer_range=0.15,
        attn_implementation="sdpa", tie_word_embeddings=tied,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return LlamaForCausalLM(config).eval()


def batch_of(rows: Sequence[int], seed: int = 11) -> PromptBatch:
    """The prompts ``rows``, each with the random stream of its number, padded to the longest of
    all.
    """
    return PromptBatch([PROMPTS[row] for row in rows], rows, seed, max(map(len, PROMPTS)))


def drawn(
    sampler: Sampler, batch: PromptBatch, version: int = 1, sampling: Sampling = SAMPLING
) -> Rollout:
    """One call of ``sample``."""
    with sampler.awake(version, len(batch), sampling.max_new_tokens):
        return sampler.sample(batch, sampling)


def agreement(
    rollout: Rollout, trainer: PreTrainedModel, precision: Precision = "float32"
) -> dict[str, float]:
    """Compare the sampler's log-probabilities with those of one pass of ``trainer``."""
    tokens = rollout.batch
    with torch.no_grad():
        scored: Tensor = token_statistics(response_logits(trainer, tokens), tokens, SAMPLING)[
            "logprobs"
        ]
    return logprob_differences(rollout.logprobs, scored, rollout.response_mask, precision)


class SamplerContract:
    """``sampler`` may have been used by an earlier test; each test syncs the weights that it
    needs.
    """

    def test_a_rollout_is_whole(self, sampler: Sampler, policy: PreTrainedModel) -> None:
        sampler.sync(policy, 1)
        rollout = drawn(sampler, batch_of(range(16)))
        width, prompt = rollout.response_mask.shape[1], max(map(len, PROMPTS))
        assert rollout.tokens.shape == rollout.attention_mask.shape == (16, prompt + width)
        assert (
            len(set(map(len, rollout.replies()))) > 2
            and rollout.finished.any()
            and not rollout.finished.all()
        )
        for row, (ids, reply) in enumerate(zip(PROMPTS, rollout.replies(), strict=True)):
            left = prompt - len(ids)
            assert rollout.tokens[row, :prompt].tolist() == [PAD] * left + ids
            real = [0] * left + [1] * (len(ids) + len(reply)) + [0] * (width - len(reply))
            assert rollout.attention_mask[row].tolist() == real
            assert rollout.response_mask[row].tolist() == [i < len(reply) for i in range(width)]
            assert (rollout.logprobs[row] < 0).tolist() == rollout.response_mask[row].tolist()
            stops = [i for i, token in enumerate(reply) if token in SAMPLING.stop_ids]
            assert bool(rollout.finished[row]) == (reply[-1] in SAMPLING.stop_ids)
            assert stops in ([], [len(reply) - 1]) and (
                stops or len(reply) == SAMPLING.max_new_tokens
            )
            assert len(reply) > SAMPLING.min_new_tokens
            assert not {*reply} & {*FORBIDDEN, VOCABULARY - 2, VOCABULARY - 1}

    def test_its_log_probabilities_are_those_of_a_fresh_forward(
        self, sampler: Sampler, policy: PreTrainedModel
    ) -> None:
        sampler.sync(policy, 1)
        require_agreement(agreement(drawn(sampler, batch_of(range(16))), policy), "float32")

    def test_a_wrong_weight_is_noticed_and_the_noise_of_bfloat16_is_not(
        self, sampler: Sampler, policy: PreTrainedModel
    ) -> None:
        sampler.sync(policy, 1)
        rollout = drawn(sampler, batch_of(range(16)))
        require_agreement(
            agreement(rollout, copy.deepcopy(policy).bfloat16(), "bfloat16"), "bfloat16"
        )
        wrong = copy.deepcopy(policy)
        with torch.no_grad():
            wrong.get_parameter("model.layers.1.mlp.down_proj.weight").mul_(2.0)
        for precision in ("float32", "bfloat16"):
            with pytest.raises(RlhfError, match="not the one that is scored"):
                require_agreement(agreement(rollout, wrong, precision), precision)

    def test_it_samples_with_the_weights_of_the_last_sync(
        self, sampler: Sampler, policy: PreTrainedModel
    ) -> None:
        sampler.sync(policy, 1)
        assert sampler.version == 1
        first = drawn(sampler, batch_of(range(16)))
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(0.05 * torch.sin(torch.arange(parameter.numel()).view_as(parameter)))
        sampler.sync(policy, 2)
        assert sampler.version == 2
        second = drawn(sampler, batch_of(range(16)), version=2)
        require_agreement(agreement(second, policy), "float32")
        assert second.replies() != first.replies()

    def test_a_stale_version_is_refused(self, sampler: Sampler, policy: PreTrainedModel) -> None:
        sampler.sync(policy, 1)
        for version in (0, 2):
            with (
                pytest.raises(RlhfError, match=f"weights of version 1, not of {version}"),
                sampler.awake(version, 1, 1),
            ):
                raise AssertionError("it woke up")
        assert len(drawn(sampler, batch_of(range(3))).replies()) == 3

    def test_order_of_sync_awake_and_sample(
        self, sampler: Sampler, policy: PreTrainedModel
    ) -> None:
        sampler.sync(policy, 1)
        with pytest.raises(RlhfError, match="inside of awake"):
            sampler.sample(batch_of([0]), SAMPLING)
        with sampler.awake(1, 1, 9):
            with pytest.raises(RlhfError, match="sync before awake"):
                sampler.sync(policy, 2)
            assert sampler.version == 1
            once = sampler.sample(batch_of([0]), SAMPLING).replies()
        with pytest.raises(RlhfError, match="inside of awake"):
            sampler.sample(batch_of([0]), SAMPLING)
        assert drawn(sampler, batch_of([0])).replies() == once

    def test_an_error_inside_of_awake_ends_it(
        self, sampler: Sampler, policy: PreTrainedModel
    ) -> None:
        sampler.sync(policy, 1)
        with pytest.raises(KeyError), sampler.awake(1, 1, 9):
            raise KeyError
        sampler.sync(policy, 2)
        assert len(drawn(sampler, batch_of([0]), version=2).replies()) == 1

    def test_ranks_with_replies_of_unequal_lengths_make_one_rollout(
        self, sampler: Sampler, policy: PreTrainedModel
    ) -> None:
        """Each rank has every second prompt. One with short replies is narrower; one may have none
        at all.
        """
        sampler.sync(policy, 1)
        whole = drawn(sampler, batch_of(range(16)))
        shares = [drawn(sampler, batch_of(range(rank, 16, 2))) for rank in range(2)]
        assert [
            reply for pair in zip(*(s.replies() for s in shares), strict=True) for reply in pair
        ] == whole.replies()
        short = drawn(sampler, batch_of([0, 4]), sampling=replace(SAMPLING, max_new_tokens=3))
        assert short.tokens.shape[1] < whole.tokens.shape[1]
        together = concatenate([short, whole], PAD)
        assert together.replies() == short.replies() + whole.replies()
        nothing = drawn(sampler, batch_of([]))
        assert nothing.replies() == [] and nothing.response_mask.shape == (0, 0)

    def test_a_stream_decides_the_draws_whatever_shares_its_batch(
        self, sampler: Sampler, policy: PreTrainedModel
    ) -> None:
        sampler.sync(policy, 1)
        whole = drawn(sampler, batch_of(range(16))).replies()
        assert drawn(sampler, batch_of(range(15, -1, -1))).replies() == whole[::-1]
        parts = sample_replies(sampler, 1, batch_of(range(16)), SAMPLING, batch_size=5)
        assert parts.replies() == whole
        assert not parts.logprobs.is_inference() and not parts.tokens.is_inference()

    def test_a_rollback_draws_other_replies_and_a_resumed_run_the_same(
        self, sampler: Sampler, policy: PreTrainedModel
    ) -> None:
        """A rollback goes back to earlier weights with another seed; a resumed run has the seed
        that it had.
        """
        kept = copy.deepcopy(policy.state_dict())
        sampler.sync(policy, 1)
        first = drawn(sampler, batch_of(range(16)))
        with torch.no_grad():
            policy.get_parameter("lm_head.weight").mul_(1.5)
        sampler.sync(policy, 2)
        drawn(sampler, batch_of(range(16)), version=2)
        policy.load_state_dict(kept)
        sampler.sync(policy, 1)
        assert drawn(sampler, batch_of(range(16))).replies() == first.replies()
        rolled_back = drawn(sampler, batch_of(range(16), seed=12))
        assert rolled_back.replies() != first.replies()
        require_agreement(agreement(rolled_back, policy), "float32")
