"""The contract of samplers, kept by the one in the trainer's own process."""

from __future__ import annotations

import pytest
from sampler_contract import SamplerContract, contract_policy
from transformers import PreTrainedModel

from rlhf_core.errors import RlhfError
from rlhf_core.sampling.local import LocalSampler
from rlhf_core.sampling.sampler import Sampler


@pytest.fixture
def policy() -> PreTrainedModel:
    return contract_policy()


class TestLocalSampler(SamplerContract):
    @pytest.fixture
    def sampler(self) -> Sampler:
        return LocalSampler()


def test_a_sampler_without_weights_samples_nothing() -> None:
    with pytest.raises(RlhfError, match="no weights yet"), LocalSampler().awake(0, 1, 1):
        raise AssertionError("it woke up")
