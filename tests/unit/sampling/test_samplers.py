"""The contract of samplers, kept by the one in the trainer's own process."""

from __future__ import annotations

import pytest
import sampler_contract as contract
from transformers import PreTrainedModel

from rlhf_core.errors import RlhfError
from rlhf_core.sampling.sampler import LocalSampler, PromptBatch, Sampler, sample_replies


@pytest.fixture
def policy() -> PreTrainedModel:
    return contract.contract_policy()


class TestLocalSampler(contract.SamplerContract):
    @pytest.fixture
    def sampler(self) -> Sampler:
        return LocalSampler()


def test_the_width_of_prompts_is_that_of_the_whole_batch(policy: PreTrainedModel) -> None:
    """Padding decides how attention rounds, so that a rank with the shorter prompts needs that of
    the others.
    """
    sampler, whole = LocalSampler.of(policy), contract.batch_of(range(16))
    longest = max(map(len, whole.ids))
    prompts = sample_replies(sampler, 0, whole, contract.SAMPLING, batch_size=5)
    assert prompts.tokens.shape[1] - prompts.response_mask.shape[1] == longest
    shortest = min(range(16), key=lambda row: len(whole.ids[row]))
    with sampler.awake(0, 1, contract.SAMPLING.max_new_tokens):
        narrow, wide = (
            sampler.sample(PromptBatch([whole.ids[shortest]], [0], 1, width), contract.SAMPLING)
            for width in (0, 40)
        )
    assert narrow.tokens.shape[1] - narrow.response_mask.shape[1] == len(whole.ids[shortest])
    assert wide.tokens.shape[1] - wide.response_mask.shape[1] == 40
    assert wide.replies() == narrow.replies()


def test_a_sampler_without_weights_samples_nothing() -> None:
    with pytest.raises(RlhfError, match="no weights yet"), LocalSampler().awake(0, 1, 1):
        raise AssertionError("it woke up")
